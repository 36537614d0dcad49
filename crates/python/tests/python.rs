//! The Python module from outside: runs `test_kvant.py` with the library of this build.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

#[test]
fn the_module_matches_its_stub() {
    let python = env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
    let is_new_enough = "import sys; sys.exit(sys.version_info < (3, 9))";
    if !Command::new(&python).args(["-c", is_new_enough]).status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: test_kvant.py: there is no Python 3.9 or later");
        return;
    }
    // Cargo puts the library beside this program; Python finds it by the module's name.
    let built = env::current_exe().unwrap().with_file_name("libkvant_python.so");
    if !built.exists() {
        eprintln!("skipped: test_kvant.py: {} is not how a library is named here", built.display());
        return;
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("python");
    fs::create_dir_all(&folder).unwrap();
    fs::copy(&built, folder.join("kvant.abi3.so")).unwrap();
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    let mut command = Command::new(&python);
    command.args(["-B", "-m", "unittest", "discover"]).arg(tests).env("PYTHONPATH", &folder);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
