"""Measures what the host does for a decode step on CUDA, without a GPU.

    cargo build --release -p kvant-cli -p kvant-cuda-stub
    LD_LIBRARY_PATH=<folder of libnvrtc> python3 tools/cuda-stub/host_cost.py

Runs `kvant bench --parallel` on the stub driver. Prints, for each number of sequences, the
microseconds of CPU that a step takes (the median, and the least, which a busy machine disturbs
less), a tenth of one per call within the driver included, and the calls of a step by kind. Needs
only Python.
"""

import argparse
import json
import os
import pathlib
import subprocess
import tempfile



def step_cost(args, stub, n_sequences):
    """Returns what the driver counted in a step."""
    report = pathlib.Path(stub) / "counts.json"
    paths = [stub, os.environ.get("LD_LIBRARY_PATH", "")]
    env = {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths)), "KVANT_STUB_REPORT": str(report)}
    command = [args.kvant, "bench", "--synthetic", args.shape, "--device", "cuda:0", "-p", "0", "-n", str(args.steps), "-r", "1"]
    command += ["--parallel", str(n_sequences), "-d", str(args.depth), "-ctk", args.type, "-ctv", args.type]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}\n{result.stderr}")
    return json.loads(report.read_text())["step"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvant", default="target/release/kvant")
    parser.add_argument("--stub", default="target/release/libkvant_cuda_stub.so")
    parser.add_argument("--shape", default="llama-3-8b:q4_0", help="as for kvant bench --synthetic")
    parser.add_argument("--parallel", default="1,16,64,256", help="numbers of sequences")
    parser.add_argument("--depth", type=int, default=2048, help="tokens in each cache")
    parser.add_argument("--type", default="turbo3", help="KV type")
    parser.add_argument("--steps", type=int, default=200, help="steps of each run, of which the second half counts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as stub:
        os.symlink(pathlib.Path(args.stub).resolve(), pathlib.Path(stub) / "libcuda.so")
        rows = {n: step_cost(args, stub, n) for n in map(int, args.parallel.split(","))}
    kinds = [kind for kind in next(iter(rows.values()))["calls"] if any(row["calls"][kind] for row in rows.values())]
    print("| sequences | us | least us | " + " | ".join(kinds) + " |")
    print("|---" * (len(kinds) + 3) + "|")
    for n, row in rows.items():
        cells = [row["cpu_ns"] // 1000, row["least_cpu_ns"] // 1000, *(row["calls"][kind] for kind in kinds)]
        print(f"| {n} | " + " | ".join(map(str, cells)) + " |")


main()
