"""Packages a staged folder: archive, deb, rpm and npm, with the same bytes for the same commit."""

import datetime
import email.utils
import hashlib
import io
import json
import os
import pathlib
import shutil
import string
import sys
import tarfile
import zipfile

from build import FEATURES, HERE, ROOT, commit_time, dated, environment, output, run, version

DESCRIPTION = "Run large language models on a compressed KV cache"
# Where releases are published.
URL = "https://github.com/kvant/kvant"
MANIFESTS = ["kvant.rb", "kvant.scoop.json", "Kvant.Kvant.yaml", "Kvant.Kvant.installer.yaml", "Kvant.Kvant.locale.en-US.yaml"]


def fill(template, **values):
    """Returns a file of `share/` with its $names replaced."""
    return string.Template((HERE / "share" / template).read_text()).substitute(version=version(), url=URL, description=DESCRIPTION, **values)


def write_archive(stage, prefix, file):
    """Writes `stage` as a tar.zst whose files lie in a folder `prefix`."""
    import zstandard

    def normalized(member):
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        member.mtime = int(commit_time())
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        return member

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path in [stage, *sorted(stage.rglob("*"))]:
            archive.add(path, pathlib.Path(prefix, path.relative_to(stage)), recursive=False, filter=normalized)
    file.write_bytes(zstandard.ZstdCompressor(level=19).compress(packed.getvalue()))


def write_zip(stage, prefix, file):
    """Writes `stage` as a zip for Windows, whose package managers read no tar.zst."""
    time = datetime.datetime.fromtimestamp(int(commit_time()), datetime.timezone.utc).timetuple()[:6]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(path for path in stage.rglob("*") if path.is_file()):
            entry = zipfile.ZipInfo(f"{prefix}/{path.relative_to(stage).as_posix()}", time)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, path.read_bytes(), compresslevel=9)


def write_archives(target, stage, symbols, out):
    """Writes the archive with its installer, and the archive of debug information."""
    name = f"kvant-{version()}-{target.triple}"
    write_archive(symbols, f"{name}-symbols", out / f"{name}-symbols.tar.zst")
    if "windows" in target.triple:
        write_zip(stage, name, out / f"{name}.zip")
        return
    whole = stage.with_name("archive")
    shutil.copytree(stage, whole)
    (whole / "install.sh").write_text(fill("install.sh"))
    (whole / "install.sh").chmod(0o755)
    write_archive(whole, name, out / f"{name}.tar.zst")


def installed(stage, folder, compress):
    """Copies `stage` below `folder`/usr, as distributions lay it out."""
    shutil.copytree(stage, folder / "usr")
    for page in sorted((folder / "usr/share/man/man1").iterdir()):
        if compress:
            run("gzip", "-9n", page)
    for path in [folder, *folder.rglob("*")]:
        os.chmod(path, 0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)
    return folder


def write_deb(target, stage, out):
    """Writes a Debian package (dpkg-deb)."""
    root = installed(stage, stage.with_name("deb"), compress=True)
    documents = root / "usr/share/doc/kvant"
    for name in ["LICENSE-MIT", "LICENSE-APACHE"]:
        (documents / name).unlink()
    (documents / "copyright").write_text(fill("copyright"))
    (documents / "copyright").chmod(0o644)
    (documents / "changelog").write_text(fill("changelog", date=email.utils.formatdate(int(commit_time()))))
    for name in ["changelog", "CHANGELOG.md"]:
        run("gzip", "-9n", documents / name)
        (documents / f"{name}.gz").chmod(0o644)
    size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) // 1024
    (root / "DEBIAN").mkdir(mode=0o755)
    (root / "DEBIAN/control").write_text(fill("control", arch=target.deb, size=size))
    file = out / f"kvant_{version()}_{target.deb}.deb"
    run("dpkg-deb", "--root-owner-group", "-Zxz", "--build", root, file, env=dated())


def write_rpm(target, stage, out):
    """Writes an RPM package (rpmbuild)."""
    root = installed(stage, stage.with_name("rpm"), compress=False)
    build = stage.with_name("rpmbuild")
    build.mkdir()
    (build / "kvant.spec").write_text(fill("kvant.spec", root=root))
    macros = {
        "_topdir": build, "_rpmdir": build, "_buildhost": "kvant", "_build_id_links": "none", "__strip": "/bin/true", "_unitdir": "/usr/lib/systemd/system",
        "use_source_date_epoch_as_buildtime": 1, "clamp_mtime_to_source_date_epoch": 1, "_rpmfilename": "kvant.rpm",
        # Distributions differ in what they compress with; each of them reads xz.
        "_binary_payload": "w6.xzdio",
    }
    defines = [word for name, value in macros.items() for word in ("--define", f"{name} {value}")]
    run("rpmbuild", "--quiet", "-bb", "--target", f"{target.rpm}-linux", *defines, build / "kvant.spec", env=dated())
    shutil.copy(build / "kvant.rpm", out / f"kvant-{version()}-1.{target.rpm}.rpm")


def npm_name(target):
    return f"@kvant/{target.npm['os']}-{target.npm['cpu']}"


def pack(folder, out):
    """Packs an npm package. npm sets all times to one date, so that two packs are equal."""
    run("npm", "pack", "--silent", "--pack-destination", out, cwd=folder, stdout=sys.stderr)


def write_npm(target, stage, out):
    """Writes the npm package of a platform: the binary alone."""
    folder = stage.with_name("npm")
    (folder / "bin").mkdir(parents=True)
    shutil.copy2(stage / "bin" / target.program, folder / "bin")
    only = {key: [value] for key, value in target.npm.items()}
    package = {
        "name": npm_name(target), "version": version(), "description": f"{DESCRIPTION}: the program for {target.triple}",
        "license": "MIT OR Apache-2.0", "repository": URL, "preferUnplugged": True, "files": ["bin"], **only,
    }
    write_package(folder, package)
    pack(folder, out)


def write_npm_main(every, folder, out):
    """Writes the npm package that users install: it depends on that of each platform and starts the one there is."""
    (folder / "bin").mkdir(parents=True)
    shutil.copy(HERE / "share/kvant.js", folder / "bin/kvant.js")
    (folder / "bin/kvant.js").chmod(0o755)
    shutil.copy(HERE / "share/npm.md", folder / "README.md")
    package = {
        "name": "kvant", "version": version(), "description": DESCRIPTION, "license": "MIT OR Apache-2.0", "repository": URL,
        "keywords": ["llm", "inference", "kv-cache", "gguf", "openai"], "bin": {"kvant": "bin/kvant.js"}, "files": ["bin"],
        "engines": {"node": ">=18"}, "optionalDependencies": {npm_name(target): version() for target in every},
    }
    write_package(folder, package)
    pack(folder, out)


def write_npm_web(target_dir, folder, out):
    """Writes the npm package `kvant-web`: the engine as WebAssembly, a module of JavaScript with its
    types, and a page that uses it."""
    run(ROOT / "crates/web/build", folder, cwd=ROOT, env=environment(target_dir))
    (folder / "index.html").unlink()
    shutil.copy(ROOT / "crates/web/page/client.js", folder / "index.js")
    names = ["index.d.ts", "README.md", "example.html"]
    for name in names:
        shutil.copy(ROOT / "crates/web/package" / name, folder)
    package = {
        "name": "kvant-web", "version": version(), "description": f"{DESCRIPTION}, in a browser", "license": "MIT OR Apache-2.0", "repository": URL,
        "keywords": ["llm", "inference", "kv-cache", "gguf", "webgpu", "wasm"], "type": "module", "sideEffects": False,
        "exports": {".": {"types": "./index.d.ts", "default": "./index.js"}, "./*": "./*"},
        "files": ["index.js", "worker.js", "kvant.packed", *names],
    }
    write_package(folder, package)
    pack(folder, out)


def write_package(folder, package):
    licences = ["LICENSE-MIT", "LICENSE-APACHE"]
    for name in licences:
        shutil.copy(ROOT / name, folder)
    package = {**package, "files": [*package["files"], *licences]}
    (folder / "package.json").write_text(json.dumps(package, indent=2) + "\n")


def write_manifests(out):
    """Writes the manifests of Homebrew, Scoop and winget for the archives that `out` holds. One whose
    archives are built elsewhere is left out."""
    sums = {path.name: checksum(path) for path in out.iterdir() if path.is_file()}
    archives = {
        "mac_arm": "aarch64-apple-darwin.tar.zst", "mac_intel": "x86_64-apple-darwin.tar.zst",
        "linux_arm": "aarch64-unknown-linux-gnu.tar.zst", "linux_intel": "x86_64-unknown-linux-gnu.tar.zst",
        "windows": "x86_64-pc-windows-msvc.zip",
    }
    known = {name: sums[file] for name, end in archives.items() if (file := f"kvant-{version()}-{end}") in sums}
    for template in MANIFESTS:
        try:
            text = fill(template, **known)
        except KeyError as missing:
            print(f"{template}: left out, there is no archive {archives[missing.args[0]]}", file=sys.stderr)
            continue
        (out / "manifests").mkdir(exist_ok=True)
        (out / "manifests" / template).write_text(text)


def checksum(file):
    return hashlib.file_digest(file.open("rb"), "sha256").hexdigest()


def write_checksums(out):
    files = sorted(path for path in out.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    (out / "SHA256SUMS").write_text("".join(f"{checksum(path)}  {path.name}\n" for path in files))


def write_sbom(out):
    """Writes the crates of all targets that the command is built from, in CycloneDX (cargo-cyclonedx)."""
    name = f"kvant-{version()}.cdx"
    manifest = ROOT / "crates/cli/Cargo.toml"
    options = ["--format", "json", "--features", FEATURES, "--target", "all", "--override-filename", name]
    run("cargo", "cyclonedx", *options, "--manifest-path", manifest, env=dated())
    # It writes one beside the manifest of each crate of ours.
    for made in [*ROOT.glob(f"*/{name}.json"), *ROOT.glob(f"*/*/{name}.json")]:
        if made.parent == manifest.parent:
            # Crates of ours are named by their folders.
            text = made.read_text().replace(ROOT.as_uri(), "file:///kvant")
            (out / f"{name}.json").write_text(text)
        made.unlink()
    if missing := crates_of_command() - {(part["name"], part["version"]) for part in json.loads(text)["components"]}:
        sys.exit(f"the SBOM lacks {sorted(missing)}")


def crates_of_command():
    """Returns name and version of each crate that the command is built from, for any target."""
    options = ["--features", FEATURES, "--target", "all", "--edges", "normal,build", "--prefix", "none", "--format", "{p}"]
    tree = output("cargo", "tree", "--locked", "-p", "kvant-cli", *options, cwd=ROOT)
    crates = {tuple(line.removesuffix(" (*)").split()[:2]) for line in tree.splitlines()}
    return {(name, version.removeprefix("v")) for name, version in crates if name != "kvant-cli"}
