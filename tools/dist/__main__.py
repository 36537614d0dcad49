"""Makes the packages of a release: archives, deb, rpm, wheel, npm, manifests, SBOM, checksums.

    python3 tools/dist                                  # of this machine's target
    python3 tools/dist aarch64-unknown-linux-gnu        # of another one, after that of this machine
    python3 tools/dist --collect                        # what is of no target, and checksums of all that is there

Rows of targets.toml are the targets. Packages go to target/dist/packages; they are the same bytes for
the same commit and tools. Linux targets are built against glibc 2.28 (zig); those of macOS and Windows
on such machines. Compilers and packers come from PyPI into target/dist/venv; deb needs dpkg-deb, rpm
needs rpmbuild, npm needs node, `kvant-web` the target
wasm32-unknown-unknown (and wasm-opt, to be small), and the SBOM `cargo install cargo-cyclonedx`.
"""

import argparse
import pathlib
import shutil
import subprocess
import sys

import build
import packages

FOLDER = build.ROOT / "target/dist"


def restart_in_venv():
    """Restarts this script in a Python with its packages."""
    venv = FOLDER / "venv"
    python = venv / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    if pathlib.Path(sys.prefix).resolve() == venv.resolve():
        return
    if not python.exists():
        build.run(sys.executable, "-m", "venv", venv)
        build.run(python, "-m", "pip", "install", "--quiet", *build.PYTHON_TOOLS)
    sys.exit(subprocess.run([str(python), *sys.argv], check=False).returncode)


def make(target, args):
    """Builds a target and all of its packages."""
    work = FOLDER / target.triple
    shutil.rmtree(work, ignore_errors=True)
    stage, symbols = work / "stage", work / "symbols"
    built = build.build_binary(target, args.target_dir)
    build.stage(target, built, stage, symbols)
    packages.write_archives(target, stage, symbols, args.out)
    if "wheel" not in args.without:
        build.build_wheel(target, args.target_dir, args.out)
    writers = [("dpkg-deb", target.deb, packages.write_deb), ("rpmbuild", target.rpm, packages.write_rpm), ("npm", target.npm, packages.write_npm)]
    for program, architecture, write in writers:
        if not architecture or program in args.without:
            continue
        if not shutil.which(program):
            sys.exit(f"{target.triple}: {program} is not installed; --without {program} leaves its package out")
        write(target, stage, args.out)


def main():
    parser = argparse.ArgumentParser(prog="tools/dist", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="targets of targets.toml; this machine's by default")
    parser.add_argument("--collect", action="store_true", help="make only what is of no target: npm packages, SBOM, manifests, checksums")
    parser.add_argument("--without", action="append", default=[], choices=["wheel", "dpkg-deb", "rpmbuild", "npm", "web", "sbom"], help="leave packages out")
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER / "packages")
    parser.add_argument("--target-dir", type=pathlib.Path, default=FOLDER / "target", help="folder of compiled crates")
    args = parser.parse_args()
    restart_in_venv()
    known = build.targets()
    for name in args.targets:
        if name not in known:
            sys.exit(f"{name} is not in targets.toml; there are {', '.join(known)}")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in [] if args.collect else args.targets or [build.host()]:
        make(known[name], args)
    if "npm" not in args.without:
        folder = FOLDER / "npm"
        shutil.rmtree(folder, ignore_errors=True)
        packages.write_npm_main(known.values(), folder, args.out)
    if not {"npm", "web"} & set(args.without):
        folder = FOLDER / "web"
        shutil.rmtree(folder, ignore_errors=True)
        packages.write_npm_web(args.target_dir, folder, args.out)
    if "sbom" not in args.without:
        packages.write_sbom(args.out)
    packages.write_manifests(args.out)
    packages.write_checksums(args.out)
    for path in sorted(args.out.iterdir()):
        if path.is_file():
            print(f"{path.stat().st_size:>10}  {path.name}")


if __name__ == "__main__":
    main()
