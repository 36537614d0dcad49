"""Tests of the command in the module, which the wheel's script `kvant` calls."""

import os
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import kvant

# What pip writes into the script.
SCRIPT = "import sys; from kvant import _command; sys.exit(_command())"
# Prints a line before it measures for hours.
BENCH = ["bench", "-p", "1", "-n", "1", "-r", "1000000"]
IS_POSIX = os.name == "posix"


def start(*args, **options):
    command = [sys.executable, "-c", SCRIPT, *map(str, args)]
    return subprocess.Popen(command, text=True, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options})


def run(*args, **options):
    process = start(*args, **options)
    out, err = process.communicate()
    return process.returncode, out, err


class Command(unittest.TestCase):
    def test_results_and_exit_codes_are_those_of_the_program(self):
        self.assertEqual(run("--version")[:2], (0, f"kvant {kvant.__version__}\n"))
        code, out, _ = run("run", "What is the capital of France?", "--temp", "0")
        self.assertEqual(code, 0)
        self.assertIn("Paris", out)
        self.assertEqual(run("inspect", "absent.gguf")[0], 1)

    def test_wrong_usage_is_one_line_of_kvant(self):
        code, out, err = run("run", "--no-such-flag")
        self.assertEqual((code, out, err.count("\n")), (2, "", 1))
        self.assertTrue(err.startswith("error: "), err)
        self.assertIn("Usage: kvant run ", run("run", "--help")[1])

    def test_the_module_imports_nothing(self):
        check = "import sys; before = set(sys.modules); import kvant; print(*set(sys.modules) - before)"
        output = subprocess.run([sys.executable, "-c", check], stdout=subprocess.PIPE, text=True, check=True)
        # A wheel has the extension in a package.
        self.assertEqual({name.split(".")[0] for name in output.stdout.split()}, {"kvant"})

    @unittest.skipUnless(IS_POSIX, "pipes of POSIX")
    def test_a_closed_pipe_is_quiet(self):
        reader, writer = os.pipe()
        os.close(reader)
        self.assertEqual(run("--help", stdout=writer), (0, None, ""))
        os.close(writer)

    @unittest.skipUnless(IS_POSIX, "file descriptors of POSIX")
    def test_no_file_takes_the_place_of_a_closed_stream(self):
        check = """
import os, sys
os.closerange(0, 3)
sys.argv[1:] = ["--version"]
from kvant import _command
code = _command()
free = os.open(os.devnull, os.O_RDONLY)
os._exit(code or free < 3)
"""
        self.assertEqual(subprocess.run([sys.executable, "-c", check], check=False).returncode, 0)


@unittest.skipUnless(IS_POSIX, "signals of POSIX")
class Signals(unittest.TestCase):
    def test_ctrl_c_ends_a_command_at_once(self):
        process = start(*BENCH)
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate()
        self.assertEqual(process.returncode, -signal.SIGINT)

    def test_ctrl_c_ends_an_answer_and_saves_its_cache(self):
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder, "cache")
            process = start("run", "Tell a story.", "--ignore-eos", "-n", "100000", "--prompt-cache", cache)
            self.assertTrue(process.stdout.read(1))
            process.send_signal(signal.SIGINT)
            process.communicate()
            self.assertEqual(process.returncode, 130)
            self.assertTrue(cache.exists())

    def test_an_ignored_ctrl_c_stays_ignored(self):
        process = start(*BENCH, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
        process.stderr.readline()
        # The signal with the lower number is delivered first.
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        process.communicate()
        self.assertEqual(process.returncode, -signal.SIGTERM)

    def test_a_server_ends_gracefully(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            process = start("serve", "--port", "0")
            while "curl http" not in process.stderr.readline():
                self.assertIsNone(process.poll())
            process.send_signal(number)
            process.communicate()
            self.assertEqual(process.returncode, 0, number)


if __name__ == "__main__":
    unittest.main()
