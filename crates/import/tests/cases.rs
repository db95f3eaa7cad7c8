//! Every case of `tests/cases`, from every source that it has, compared in the index.

mod common;

use common::{Home, Opened, sha256};
use image::index::InodeKind;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The cases, generated once for this binary.
fn cases() -> &'static Path {
    static DIR: OnceLock<tempfile::TempDir> = OnceLock::new();
    DIR.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        let generator = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cases/gen.py");
        let run = |args: &[&str]| {
            let output = Command::new("python3").arg(&generator).args(args).output().unwrap();
            assert!(output.status.success(), "gen.py {args:?}: {}", String::from_utf8_lossy(&output.stderr));
            output.stdout
        };
        let out = dir.path().to_str().unwrap();
        if root() {
            run(&["--all", "--out", out]);
            return dir;
        }
        // Cases of kind dir need root, so without it the others are made one by one.
        let list: Value = serde_json::from_slice(&run(&["--list", "--json"])).unwrap();
        for case in list.as_array().unwrap().iter().filter(|c| c["kind"] != "dir") {
            run(&["--case", case["name"].as_str().unwrap(), "--out", out]);
        }
        dir
    })
    .path()
}

fn root() -> bool {
    rustix::process::geteuid().is_root()
}

fn base64(text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    let (mut bits, mut n) = (0u32, 0);
    for b in text.bytes().filter(|&b| b != b'=') {
        let v =
            b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/".iter().position(|&c| c == b).unwrap();
        bits = bits << 6 | v as u32;
        n += 6;
        if n >= 8 {
            n -= 8;
            out.push((bits >> n) as u8);
        }
    }
    out
}

fn bytes(entry: &Value, key: &str) -> Vec<u8> {
    match entry[format!("{key}_b64")].as_str() {
        Some(b) => base64(b),
        None => entry[key].as_str().unwrap().as_bytes().to_vec(),
    }
}

/// A tree's entries by path, bulk ones written out.
fn expand(tree: &Value) -> BTreeMap<Vec<u8>, Value> {
    let mut out: BTreeMap<_, _> =
        tree["entries"].as_array().unwrap().iter().map(|e| (bytes(e, "path"), e.clone())).collect();
    for bulk in tree["bulk"].as_array().into_iter().flatten() {
        let pattern = bulk["pattern"].as_str().unwrap();
        let (prefix, rest) = pattern.split_once("%0").unwrap();
        let (width, suffix) = rest.split_once('d').unwrap();
        let start = bulk["start"].as_u64().unwrap();
        for i in start..start + bulk["count"].as_u64().unwrap() {
            let path = format!("{}/{prefix}{i:0w$}{suffix}", bulk["dir"].as_str().unwrap(), w = width.parse().unwrap());
            out.insert(path.into_bytes(), bulk["entry"].clone());
        }
    }
    out
}

fn differences(want: &BTreeMap<Vec<u8>, Value>, image: &Opened) -> Vec<String> {
    let have = image.paths();
    let mut out = Vec::new();
    let show = |p: &[u8]| String::from_utf8_lossy(p).into_owned();
    for path in have.keys().filter(|p| !want.contains_key(*p)) {
        out.push(format!("{}: unexpected", show(path)));
    }
    let mut groups: HashMap<u64, u32> = HashMap::new();
    let mut owners: HashMap<u32, (u64, Vec<u8>)> = HashMap::new();
    let mut hashes: HashMap<u32, String> = HashMap::new();
    for (path, entry) in want {
        let Some(&ino) = have.get(path) else {
            out.push(format!("{}: missing", show(path)));
            continue;
        };
        let inode = image.index.inode(ino).unwrap();
        let mut differ = |what: &str, have: String, want: String| {
            if have != want {
                out.push(format!("{}: {what} {have}, want {want}", show(path)));
            }
        };
        let kind = match inode.kind {
            InodeKind::File { .. } => "file",
            InodeKind::Dir { .. } => "dir",
            InodeKind::Symlink { .. } => "symlink",
            InodeKind::Char { .. } => "chr",
            InodeKind::Block { .. } => "blk",
            InodeKind::Fifo => "fifo",
            InodeKind::Socket => "sock",
        };
        differ("type", kind.into(), entry["type"].as_str().unwrap().into());
        if kind != "symlink" {
            differ("mode", format!("{:04o}", inode.permissions()), entry["mode"].as_str().unwrap().into());
        }
        differ("uid", inode.uid.to_string(), entry["uid"].to_string());
        differ("gid", inode.gid.to_string(), entry["gid"].to_string());
        if !entry["mtime_ns"].is_null() {
            let ns = i128::from(inode.mtime_sec) * 1_000_000_000 + i128::from(inode.mtime_nsec);
            differ("mtime", ns.to_string(), entry["mtime_ns"].to_string());
        }
        let ok = |n: &Value| n.as_u64() == Some(inode.nlink.into());
        if !ok(&entry["nlink"]) && !entry["nlink_ok"].as_array().is_some_and(|l| l.iter().any(ok)) {
            differ("nlink", inode.nlink.to_string(), entry["nlink"].to_string());
        }
        if let InodeKind::File { size } = inode.kind {
            differ("size", size.to_string(), entry["size"].to_string());
            if let Some(sum) = entry["sha256"].as_str() {
                let have = hashes.entry(ino).or_insert_with(|| image.sha256(ino, size)).clone();
                differ("sha256", have, sum.into());
            }
            for probe in entry["probes"].as_array().into_iter().flatten() {
                let (at, len) = (probe[0].as_u64().unwrap(), probe[1].as_u64().unwrap());
                differ(&format!("bytes at {at}"), sha256(&image.read(ino, at, len)), probe[2].as_str().unwrap().into());
            }
        }
        match inode.kind {
            InodeKind::Symlink { .. } => {
                let have = image.index.link_target(ino).unwrap();
                differ("target", show(have), show(&bytes(entry, "target")));
                assert!(have == bytes(entry, "target"), "{}", show(path));
            }
            InodeKind::Char { major, minor } | InodeKind::Block { major, minor } => {
                differ("rdev", format!("[{major},{minor}]"), entry["rdev"].to_string());
            }
            _ => {}
        }
        let want_xattrs: BTreeMap<Vec<u8>, Vec<u8>> = entry["xattrs"]
            .as_object()
            .unwrap()
            .iter()
            .map(|(k, v)| (k.as_bytes().to_vec(), base64(v.as_str().unwrap())))
            .collect();
        let mut have_xattrs = image.xattrs(&inode);
        // Set by the host's policy, for directories only.
        have_xattrs.remove(&b"security.selinux"[..]);
        differ("xattrs", format!("{have_xattrs:?}"), format!("{want_xattrs:?}"));
        if kind != "dir" {
            let group = entry["hardlink_group"].as_u64();
            if let Some(g) = group {
                let first = *groups.entry(g).or_insert(ino);
                differ("inode of the group", ino.to_string(), first.to_string());
            }
            let key = group.map_or((0, path.clone()), |g| (g, Vec::new()));
            let owner = owners.entry(ino).or_insert_with(|| key.clone()).clone();
            differ("owner of the inode", format!("{key:?}"), format!("{owner:?}"));
        }
    }
    out
}

/// Imports one source of one case and judges the outcome; a line for each thing that is wrong.
fn judge(case: &Path, expected: &Value, source: &str) -> Vec<String> {
    let home = Home::new();
    let expect = expected["expect"].as_str().unwrap();
    let result = home.import(source);
    for path in expected["must_not_exist"].as_array().into_iter().flatten() {
        assert!(!Path::new(path.as_str().unwrap()).exists(), "escaped to {path}");
    }
    match result {
        Err(e) => {
            home.assert_untouched();
            let text = e.to_string();
            if expect == "ok" {
                return vec![format!("{source}: refused: {text}")];
            }
            if std::env::var_os("SHOW_REFUSALS").is_some() {
                println!("{}: {text}", case.file_name().unwrap().display());
            }
            if !text.contains(case.to_str().unwrap()) {
                return vec![format!("{source}: the refusal does not name the source: {text}")];
            }
            Vec::new()
        }
        Ok(_) if expect == "reject" => vec![format!("{source}: had to be refused")],
        Ok(imported) => {
            let image = home.opened();
            assert_eq!(imported.record.identity, image.index.identity());
            assert_eq!(imported.record.names + 1, image.paths().len() as u64);
            let trees = expected["trees"].as_array().unwrap();
            let all = trees.iter().map(|t| differences(&expand(t), &image));
            let best = all.min_by_key(Vec::len).unwrap();
            best.into_iter().map(|d| format!("{source}: {d}")).collect()
        }
    }
}

fn run(keep: impl Fn(&str) -> bool) -> usize {
    let mut count = 0;
    let mut wrong = Vec::new();
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(cases()).unwrap().map(|e| e.unwrap().path()).collect();
    dirs.sort();
    for case in dirs {
        let expected: Value = serde_json::from_slice(&std::fs::read(case.join("expected.json")).unwrap()).unwrap();
        for (key, file) in expected["inputs"].as_object().unwrap() {
            if ["oci", "tar", "dir", "docker-archive"].contains(&key.as_str()) && keep(key) {
                let mut source = format!("{key}:{}", case.join(file.as_str().unwrap()).display());
                if key == "oci" {
                    source += ":latest";
                }
                count += 1;
                wrong.extend(judge(&case, &expected, &source));
            }
        }
    }
    assert!(wrong.is_empty(), "{} differences:\n{}", wrong.len(), wrong.join("\n"));
    count
}

#[test]
fn cases_from_oci_layouts() {
    assert!(run(|k| k == "oci") > 50);
}

#[test]
fn cases_from_archives() {
    assert!(run(|k| k == "tar" || k == "docker-archive") > 30);
}

#[test]
fn priv_cases_from_directories() {
    if !root() {
        println!("SKIP priv_cases_from_directories: owners, devices and trusted.* need root");
        return;
    }
    assert!(run(|k| k == "dir") >= 2);
}
