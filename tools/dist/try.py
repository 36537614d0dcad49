"""Installs, runs and removes each package of this machine's target in an empty Debian (debootstrap).

    sudo python3 tools/dist/try.py target/dist/packages [--mirror URL]

Prints the seconds of each step. What a removal leaves behind is an error. Needs root for chroot; npm
and node come from this machine, which reads the rpm's requirements too.
"""

import argparse
import contextlib
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request

QUESTION = "What is the capital of France?"
PORT = 18080
# The oldest glibc that packages are for: RHEL 8, Debian 10.
GLIBC = (2, 28)
# What the system itself writes while packages come and go.
OWN = ("/proc", "/sys", "/dev", "/tmp", "/run", "/var/lib/dpkg", "/var/lib/rpm", "/var/cache", "/var/log", "/root", "/etc/.pwd.lock")


class Root:
    """An empty system in a folder."""

    def __init__(self, base, name):
        self.path = base.with_name(name)
        subprocess.run(["cp", "-a", base, self.path], check=True)
        for mount in ["proc", "dev"]:
            subprocess.run(["mount", "--rbind", f"/{mount}", self.path / mount], check=True)
        self.before = self.files()

    def unmount(self):
        for mount in ["proc", "dev"]:
            subprocess.run(["umount", "-l", self.path / mount], check=True)

    def close(self):
        self.unmount()
        shutil.rmtree(self.path)

    def files(self):
        found = set()
        for folder, folders, files in os.walk(self.path):
            inside = "/" + os.path.relpath(folder, self.path)
            folders[:] = [name for name in folders if not os.path.join(inside, name).replace("/./", "/").startswith(OWN)]
            found.update(os.path.join(inside, name) for name in files if "__pycache__" not in inside)
        return {path for path in found if not path.startswith(OWN)}

    def command(self, *args):
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", "LC_ALL": "C.UTF-8"}
        return {"args": ["chroot", str(self.path), *args], "env": environment, "text": True}

    def run(self, *args):
        done = subprocess.run(**self.command(*args), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            sys.exit(f"{' '.join(args)}: exit {done.returncode}\n{done.stdout}")
        return done.stdout

    def start(self, *args):
        return subprocess.Popen(**self.command(*args), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def serve(root, program):
    """Starts the server, asks it the question over HTTP, and stops it."""
    server = root.start(program, "serve", "--port", str(PORT))
    body = json.dumps({"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 20}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/v1/chat/completions", body, {"Content-Type": "application/json"})
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as answer:
                text = json.load(answer)["choices"][0]["message"]["content"]
                break
            time.sleep(0.1)
        else:
            sys.exit("the server did not answer")
    finally:
        server.terminate()
        server.wait(60)
    return text


def attempt(base, file, install, remove, program="kvant"):
    """Installs, runs, serves and removes a package; returns the seconds of each step."""
    root = Root(base, f"{base.name}-{file.name}")
    seconds = {}
    try:
        shutil.copy(file, root.path / "root" / file.name)
        steps = {
            "install": lambda: [root.run("sh", "-ec", command) for command in install],
            "run": lambda: root.run(program, "run", QUESTION, "--temp", "0"),
            "serve": lambda: serve(root, program),
            "remove": lambda: [root.run("sh", "-ec", command) for command in remove],
        }
        for name, step in steps.items():
            start = time.monotonic()
            output = step()
            seconds[name] = time.monotonic() - start
            if name in ("run", "serve") and "Paris" not in output:
                sys.exit(f"{file.name}: {name} answered {output!r}")
        if left := root.files() - root.before:
            sys.exit(f"{file.name}: left after removal: {sorted(left)[:10]}")
    finally:
        root.close()
    print(f"{file.name}: " + ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()), flush=True)


def add_node(base):
    """Copies this machine's node and npm into the system."""
    node = pathlib.Path(shutil.which("node")).resolve()
    npm = pathlib.Path(shutil.which("npm")).resolve().parents[1]
    shutil.copy(node, base / "usr/bin/node")
    shutil.copytree(npm, base / "usr/lib/node_modules/npm", symlinks=True)
    (base / "usr/bin/npm").symlink_to("../lib/node_modules/npm/bin/npm-cli.js")


def add_rpm(base):
    """Returns a copy of the system with rpm."""
    with_rpm = base.with_name("with-rpm")
    root = Root(base, with_rpm.name)
    root.run("sh", "-ec", "apt-get -qq update && apt-get -qq install --yes --no-install-recommends rpm")
    root.unmount()
    return with_rpm


def check_requirements(file):
    """Ends with an error where the package needs more than glibc of an old system."""
    needed = subprocess.run(["rpm", "-qp", "--requires", file], check=True, stdout=subprocess.PIPE, text=True).stdout.split("\n")
    known = re.compile(r"(rpmlib\(|rtld\(|ld-linux|lib(c|m|dl|rt|pthread|gcc_s)\.so\.|$)")
    if other := [name for name in needed if not known.match(name)]:
        sys.exit(f"{file.name}: needs {other}")
    newest = max(tuple(map(int, version.split("."))) for version in re.findall(r"\(GLIBC_([\d.]+)\)", "\n".join(needed)))
    if newest > GLIBC:
        sys.exit(f"{file.name}: needs glibc {newest}, expected no newer than {GLIBC}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=pathlib.Path)
    parser.add_argument("--mirror", default="http://deb.debian.org/debian")
    args = parser.parse_args()
    machine = platform.machine()
    debian, npm_cpu = {"x86_64": ("amd64", "x64"), "aarch64": ("arm64", "arm64")}[machine]

    def the(pattern):
        return next(iter(args.packages.glob(pattern)), None) or sys.exit(f"{args.packages} has no {pattern}")

    with tempfile.TemporaryDirectory() as folder:
        base = pathlib.Path(folder, "bookworm")
        include = "--include=ca-certificates,python3-venv,zstd"
        subprocess.run(["debootstrap", "--variant=minbase", include, "bookworm", base, args.mirror], check=True, stdout=subprocess.DEVNULL)
        add_node(base)
        archive = the(f"kvant-[0-9]*-{machine}-unknown-linux-gnu.tar.zst")
        name = archive.name.removesuffix(".tar.zst")
        unpack = f"cd /tmp && tar xf /root/{archive.name}"
        attempt(base, archive, [unpack, f"/tmp/{name}/install.sh"], [f"/tmp/{name}/install.sh --remove"])
        deb = the(f"kvant_*_{debian}.deb")
        attempt(base, deb, [f"dpkg -i /root/{deb.name}"], ["dpkg --purge kvant"])
        wheel = the(f"kvant-*manylinux*{machine}.whl")
        check = "/root/venv/bin/python -c 'import kvant; print(kvant.Model.bundled().n_vocab)'"
        venv = ["python3 -m venv /root/venv", f"/root/venv/bin/pip install --no-index /root/{wheel.name}", check]
        gone = "test ! -e /root/venv/bin/kvant && ! /root/venv/bin/python -c 'import kvant' 2>/dev/null && rm -r /root/venv"
        attempt(base, wheel, venv, ["/root/venv/bin/pip uninstall -y kvant", gone], "/root/venv/bin/kvant")
        npm, platform_package = the("kvant-[0-9].*.tgz"), the(f"kvant-linux-{npm_cpu}-*.tgz")
        shutil.copy(platform_package, base / "root")
        # Packages of other platforms are on no registry yet.
        install = f"npm install --global --omit=optional --offline /root/{platform_package.name} /root/{npm.name}"
        attempt(base, npm, [install], [f"npm uninstall --global kvant @kvant/linux-{npm_cpu}"])
        rpm = the(f"kvant-*.{machine}.rpm")
        check_requirements(rpm)
        # Debian's database of rpm knows no libraries: check_requirements has looked at them.
        attempt(add_rpm(base), rpm, [f"rpm --force-debian --nodeps -i /root/{rpm.name}"], ["rpm --force-debian -e kvant"])


if __name__ == "__main__":
    main()
