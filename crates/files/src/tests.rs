//! Tests of reading and writing files.

use std::process::{Command, Stdio};
use std::time::Duration;

use super::*;
use crate::temp_file::Unfinished;

/// Creates an empty folder for one test.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("kvant-files-{}-{name}", std::process::id()));
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn names(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn a_failed_write_leaves_the_old_file_and_nothing_else() {
    let folder = folder("failed");
    let path = folder.join("file");
    write(&path, b"old").unwrap();
    let failed = write_atomic(&path, std::convert::identity, |file| {
        io::Write::write_all(file, b"half of the n")?;
        Err::<(), _>(io::Error::from(io::ErrorKind::StorageFull))
    });
    assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
    let panicked = std::panic::catch_unwind(|| {
        write_atomic(&path, std::convert::identity, |_| -> io::Result<()> { panic!("the caller's own") })
    });
    assert!(panicked.is_err());
    assert_eq!((read(&path).unwrap(), names(&folder)), (b"old".to_vec(), vec!["file".to_owned()]));
    write(&path, b"new").unwrap();
    assert_eq!((read(&path).unwrap(), names(&folder)), (b"new".to_vec(), vec!["file".to_owned()]));
    fs::remove_dir_all(&folder).unwrap();
}

/// Creates a node with a system tool; returns `None` and prints a line where that is unavailable or
/// not permitted.
#[cfg(unix)]
fn node(path: &Path, tool: &str, args: &[&str]) -> Option<()> {
    let made = Command::new(tool).arg(path).args(args).stderr(Stdio::null()).status();
    if !made.is_ok_and(|status| status.success()) {
        eprintln!("skipped: {tool} {args:?}: not here, or not allowed");
        return None;
    }
    Some(())
}

#[cfg(unix)]
#[test]
fn non_regular_files_are_rejected_and_left_unchanged() {
    use std::os::unix::fs::FileTypeExt;
    let folder = folder("nodes");
    let path = |name: &str| folder.join(name);
    fs::create_dir(path("folder")).unwrap();
    let mut nodes = vec![("folder", "is a folder, not a regular file")];
    nodes.extend(node(&path("pipe"), "mkfifo", &[]).map(|()| ("pipe", "is a pipe, not a regular file")));
    let device = node(&path("device"), "mknod", &["c", "1", "3"]);
    nodes.extend(device.map(|()| ("device", "is a device, not a regular file")));
    let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
    nodes.push(("socket", "is a socket, not a regular file"));
    for (name, message) in nodes {
        // The same holds through a symlink.
        let link = path(&format!("link to {name}"));
        std::os::unix::fs::symlink(name, &link).unwrap();
        for path in [path(name), link] {
            let kind = fs::symlink_metadata(&path).unwrap().file_type();
            let answers = [
                open(&path).map(drop),
                read(&path).map(drop),
                open_for_update(&path).map(drop),
                check_target(&path),
                write(&path, b"x"),
            ];
            for answer in answers {
                assert_eq!(answer.unwrap_err().to_string(), message, "{}", path.display());
            }
            assert_eq!(fs::symlink_metadata(&path).unwrap().file_type(), kind, "{}", path.display());
        }
        let kind = fs::metadata(path(name)).unwrap().file_type();
        assert!(kind.is_dir() || kind.is_fifo() || kind.is_char_device() || kind.is_socket());
    }
    assert!(!names(&folder).iter().any(|name| name.ends_with(".tmp")));
    fs::remove_dir_all(&folder).unwrap();
}

#[cfg(unix)]
#[test]
fn private_files_are_private_in_any_folder_and_on_replacement() {
    use std::io::Write;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let folder = folder("private");
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
    let path = folder.join("file");
    for old in [None, Some(0o644), Some(0o666), Some(0o600), Some(0o400 | 0o200)] {
        if let Some(old) = old {
            fs::set_permissions(&path, fs::Permissions::from_mode(old)).unwrap();
        }
        write_private(&path, std::convert::identity, |file| {
            // Nor during the write.
            assert_eq!(file.get_ref().metadata()?.mode() & 0o777, 0o600);
            file.write_all(b"text")
        })
        .unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600, "{old:?}");
    }
    fs::remove_dir_all(&folder).unwrap();
}

#[cfg(unix)]
#[test]
fn replaced_files_keep_mode_and_owner_new_ones_use_the_umask() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
    let folder = folder("mode");
    let path = folder.join("file");
    write(&path, b"new").unwrap();
    // According to the umask, as for any file.
    fs::write(folder.join("other"), b"").unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
    assert_eq!(mode(&path), mode(&folder.join("other")));
    for expected in [0o600, 0o640, 0o666, 0o755] {
        fs::set_permissions(&path, fs::Permissions::from_mode(expected)).unwrap();
        write(&path, b"newer").unwrap();
        assert_eq!(mode(&path), expected, "{expected:o}");
    }
    match chown(&path, Some(12345), Some(54321)) {
        Err(_) => eprintln!("skipped: only root can give files away"),
        Ok(()) => {
            write(&path, b"newest").unwrap();
            let metadata = fs::metadata(&path).unwrap();
            assert_eq!((metadata.uid(), metadata.gid(), mode(&path)), (12345, 54321, 0o755));
        }
    }
    fs::remove_dir_all(&folder).unwrap();
}

#[cfg(unix)]
#[test]
fn a_symlink_is_kept_and_its_target_is_written() {
    use std::os::unix::fs::symlink;
    let folder = folder("links");
    let path = |name: &str| folder.join(name);
    fs::create_dir(path("below")).unwrap();
    symlink("below/file", path("one")).unwrap();
    symlink(path("one"), path("two")).unwrap();
    // First to a missing target, then over an existing one.
    for bytes in [b"new", b"old"] {
        check_target(path("two")).unwrap();
        write(path("two"), bytes).unwrap();
        assert_eq!(fs::read(path("below/file")).unwrap(), bytes);
        assert!(["one", "two"].iter().all(|name| fs::symlink_metadata(path(name)).unwrap().is_symlink()));
    }
    assert_eq!((names(&path("below")), names(&folder).len()), (vec!["file".to_owned()], 3));
    symlink("loop", path("loop")).unwrap();
    assert!(write(path("loop"), b"x").is_err() && open(path("loop")).is_err());
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn unwritable_targets_are_detected_before_writing() {
    let folder = folder("targets");
    let error_of = |path: &Path| check_target(path).unwrap_err().to_string();
    let missing = folder.join("missing");
    assert!(error_of(&missing.join("file")).contains(&format!("folder {missing:?}")));
    write(folder.join("file"), b"x").unwrap();
    assert!(error_of(&folder.join("file").join("below")).contains("ot a directory"));
    assert!(check_target(Path::new("/")).is_err() && check_target(Path::new("")).is_err());
    // The check leaves no file and changes none.
    check_target(folder.join("file")).unwrap();
    check_target(folder.join("new")).unwrap();
    assert_eq!(
        (names(&folder), read(folder.join("file")).unwrap()),
        (vec!["file".to_owned()], b"x".to_vec())
    );
    fs::remove_dir_all(&folder).unwrap();
}

#[cfg(unix)]
#[test]
fn read_only_folders_and_files_are_rejected() {
    use std::os::unix::fs::PermissionsExt;
    let folder = folder("read-only");
    let (file, below) = (folder.join("file"), folder.join("below"));
    write(&file, b"x").unwrap();
    fs::create_dir(&below).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o444)).unwrap();
    fs::set_permissions(&below, fs::Permissions::from_mode(0o555)).unwrap();
    if fs::write(below.join("probe"), b"").is_ok() {
        eprintln!("skipped: to root nothing is read-only");
    } else {
        let kind = |path: &Path| check_target(path).unwrap_err().kind();
        assert_eq!(kind(&file), io::ErrorKind::PermissionDenied);
        assert_eq!(kind(&below.join("file")), io::ErrorKind::PermissionDenied);
    }
    fs::set_permissions(&below, fs::Permissions::from_mode(0o755)).unwrap();
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn abandoned_files_are_removed_and_locked_ones_are_kept() {
    let folder = folder("abandoned");
    let path = folder.join("file");
    for left in [".file.4194305.tmp", ".file.1-3.tmp"] {
        fs::write(folder.join(left), b"left").unwrap();
    }
    fs::write(folder.join(".other.1.tmp"), b"of another").unwrap();
    fs::write(folder.join(".file.notes.tmp"), b"of the user").unwrap();
    // As on file systems without unnamed files.
    let unfinished = Unfinished::named(&path, 0o666).unwrap();
    io::Write::write_all(&mut unfinished.file().unwrap(), b"first").unwrap();
    let own_name = format!(".file.{}-0.tmp", std::process::id());
    write(&path, b"second").unwrap();
    assert_eq!(names(&folder), [own_name.as_str(), ".file.notes.tmp", ".other.1.tmp", "file"]);
    unfinished.rename(&path).unwrap();
    assert_eq!(read(&path).unwrap(), b"first");
    assert_eq!(names(&folder), [".file.notes.tmp", ".other.1.tmp", "file"]);
    drop(Unfinished::named(&path, 0o666).unwrap());
    assert_eq!(names(&folder).len(), 3);
    fs::remove_dir_all(&folder).unwrap();
}

/// Set in the child process of the next test: the file it writes until it is killed.
const WRITE_FOREVER: &str = "KVANT_TEST_WRITE_FOREVER";

#[test]
fn a_killed_process_leaves_the_old_file() {
    if let Some(path) = std::env::var_os(WRITE_FOREVER) {
        let forever = |file: &mut io::BufWriter<File>| -> io::Result<()> {
            io::Write::write_all(file, &vec![1; 3 << 20])?;
            println!("half");
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        };
        write_atomic(&path, std::convert::identity, forever).unwrap();
    }
    let folder = folder("killed");
    let path = folder.join("file");
    write(&path, b"old").unwrap();
    let test = "tests::a_killed_process_leaves_the_old_file";
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(WRITE_FOREVER, &path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("half") {
        assert!(io::BufRead::read_line(&mut stdout, &mut line).unwrap() > 0, "the child ended: {line}");
    }
    child.kill().unwrap();
    child.wait().unwrap();
    if cfg!(target_os = "linux") {
        assert_eq!(names(&folder), ["file"], "without a name, nothing is left");
    }
    assert_eq!(read(&path).unwrap(), b"old");
    write(&path, b"new").unwrap();
    assert_eq!((names(&folder), read(&path).unwrap()), (vec!["file".to_owned()], b"new".to_vec()));
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn edit_creates_missing_files_and_keeps_contents() {
    let folder = folder("edit");
    let path = folder.join("file");
    io::Write::write_all(&mut open_for_update(&path).unwrap(), b"12345").unwrap();
    io::Write::write_all(&mut open_for_update(&path).unwrap(), b"ab").unwrap();
    assert_eq!(read(&path).unwrap(), b"ab345");
    fs::remove_dir_all(&folder).unwrap();
}
