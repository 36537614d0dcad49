"""Builds the binary and the library of a target, and stages what packages install."""

import dataclasses
import hashlib
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent
# Everything that a user may need, found at run time or chosen by a flag.
FEATURES = "wgpu,grpc,kv-events,otel"
# Fast like a release, small, with lines for debuggers in a file of their own.
PROFILE = "dist"
# Programs of the build: their versions are part of what makes two builds equal.
PYTHON_TOOLS = ["maturin==1.16.0", "ziglang==0.17.1", "cargo-zigbuild==0.24.1", "zstandard==0.25.0"]
# The type of an ELF note with a build id.
NT_GNU_BUILD_ID = 3
SHELLS = {
    "bash": "share/bash-completion/completions/kvant",
    "fish": "share/fish/vendor_completions.d/kvant.fish",
    "zsh": "share/zsh/site-functions/_kvant",
}


def output(*args, **options):
    return subprocess.run([str(arg) for arg in args], check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def run(program, *args, **options):
    # Windows looks for programs in the PATH of this process only, and for .exe only.
    path = options.get("env", os.environ)["PATH"]
    found = shutil.which(program, path=path) or program
    subprocess.run([str(arg) for arg in [found, *args]], check=True, **options)


@dataclasses.dataclass
class Target:
    """A row of targets.toml, and where its files are built."""

    triple: str
    npm: dict
    zig: str = ""
    deb: str = ""
    rpm: str = ""

    @property
    def suffix(self):
        return ".exe" if "windows" in self.triple else ""

    @property
    def program(self):
        return f"kvant{self.suffix}"


def targets():
    """Returns the targets by their triples."""
    table = tomllib.loads((HERE / "targets.toml").read_text())["target"]
    return {row["triple"]: Target(**row) for row in table}


def host():
    return next(line.split()[1] for line in output("rustc", "-vV").splitlines() if line.startswith("host:"))


def version():
    return tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]


def commit_time():
    """Returns the time of the commit in seconds: the time of every file in a package."""
    return output("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()


def dated():
    """Returns the environment with the time that packers give to files."""
    return {**os.environ, "SOURCE_DATE_EPOCH": commit_time()}


def sysroot():
    return pathlib.Path(output("rustc", "--print", "sysroot").strip())


def environment(folder):
    """Returns variables under which two builds of a commit are equal, wherever they run."""
    home = pathlib.Path(os.environ.get("CARGO_HOME", pathlib.Path.home() / ".cargo"))
    folders = {ROOT: "/kvant", home: "/cargo", sysroot(): "/rust", folder: "/target"}
    return {
        **dated(),
        "CARGO_INCREMENTAL": "0",
        "CARGO_TARGET_DIR": str(folder),
        "TZ": "UTC",
        "LC_ALL": "C",
        "CARGO_ENCODED_RUSTFLAGS": "\x1f".join(f"--remap-path-prefix={a}={b}" for a, b in folders.items()),
        "CFLAGS": " ".join(f"-ffile-prefix-map={a}={b}" for a, b in folders.items()),
        "PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def build_binary(target, folder):
    """Compiles the command; returns the binary with its debug information."""
    cross = ["zigbuild", "--target", target.zig] if target.zig else ["build", "--target", target.triple]
    # With the features of the wheel's dependencies (of syn, say), crates of both are compiled once.
    packages = ["--bin", "kvant", "-p", "kvant-cli", "-p", "kvant-python"]
    command = ["cargo", *cross, "--profile", PROFILE, "--locked", *packages, "--features", FEATURES]
    run(*command, cwd=ROOT, env=environment(folder))
    return folder / target.triple / PROFILE / target.program


def split_symbols(target, built, stage, symbols):
    """Copies the binary without debug information, and that information into a folder of its own.
    Both get the same build id, by which debuggers match them: a link with a checksum of the
    information would differ between folders, whose paths are in that of zig's start files."""
    program = stage / "bin" / target.program
    program.parent.mkdir(parents=True)
    symbols.mkdir(parents=True)
    if "linux" not in target.triple:
        shutil.copy2(built, program)
        for beside in [*built.parent.glob("kvant.pdb"), *built.parent.glob("kvant.dSYM")]:
            (shutil.copytree if beside.is_dir() else shutil.copy2)(beside, symbols / beside.name)
        return
    objcopy = sysroot() / "lib/rustlib" / host() / "bin/rust-objcopy"
    debug = symbols / "kvant.debug"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(sysroot() / "lib")}
    run(objcopy, "--only-keep-debug", built, debug, env=environment)
    run(objcopy, "--strip-all", built, program, env=environment)
    note = symbols / "note"
    note.write_bytes(struct.pack("<III4s", 4, 20, NT_GNU_BUILD_ID, b"GNU") + hashlib.sha1(program.read_bytes()).digest())
    for file in [debug, program]:
        section = ".note.gnu.build-id"
        run(objcopy, f"--add-section={section}={note}", f"--set-section-flags={section}=readonly", file, env=environment)
    note.unlink()
    if (dwp := built.with_suffix(".dwp")).exists():
        shutil.copy2(dwp, symbols / "kvant.dwp")


def stage(target, built, stage, symbols):
    """Lays out what is installed below a prefix such as /usr: program, manual pages, completions,
    licences. The program itself prints pages and completions; for another system, that of this one."""
    split_symbols(target, built, stage, symbols)
    native = stage / "bin" / target.program
    if target.triple != host():
        native = built.parents[2] / host() / PROFILE / "kvant"
        if not native.exists():
            sys.exit(f"{target.triple}: build {host()} first: its program prints the manual pages")
    write_manual(native, stage / "share/man/man1")
    for shell, path in SHELLS.items():
        (stage / path).parent.mkdir(parents=True, exist_ok=True)
        (stage / path).write_text(output(native, "completions", shell))
    documents = stage / "share/doc/kvant"
    documents.mkdir(parents=True)
    for name in ["README.md", "CHANGELOG.md", "LICENSE-MIT", "LICENSE-APACHE"]:
        shutil.copy(ROOT / name, documents)
    units = stage / "lib/systemd/system"
    units.mkdir(parents=True)
    shutil.copy(HERE / "share/kvant.service", units)


def write_manual(program, folder):
    """Writes a manual page for the program and for each of its commands."""
    folder.mkdir(parents=True)
    (folder / "kvant.1").write_text(output(program, "man"))
    names = [line.split()[0] for line in output(program, "--help").split("Commands:")[1].split("\n\n")[0].splitlines() if line.strip()]
    for name in names:
        if name != "help":
            (folder / f"kvant-{name}.1").write_text(output(program, "man", name))


def build_wheel(target, folder, out):
    """Builds the wheel: the library, which contains the command."""
    command = ["maturin", "build", "--profile", PROFILE, "--strip", "--locked", "--compression-level", "9", "--target", target.triple]
    variables = environment(folder)
    if target.zig:
        command += ["--compatibility", "manylinux_2_28"]
        variables |= {"CARGO": str(HERE / "share/cargo-zig"), "TRIPLE": target.triple, "ZIG_TARGET": target.zig}
    run(*command, "--features", FEATURES, "-m", "crates/python/Cargo.toml", "-o", out, cwd=ROOT, env=variables)
