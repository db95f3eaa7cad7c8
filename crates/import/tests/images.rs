//! OCI layouts and docker archives: finding the image, checking it, reading its layers.

mod common;

use common::make::{Layout, gzip, noise, plain_layout, tar, zstd};
use common::{Home, options, sha256};
use lazyroot_import::{Counts, ImportError, Platform, Progress};
use serde_json::json;
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;

fn text(error: ImportError) -> String {
    error.to_string()
}

fn oci(dir: &Path) -> String {
    format!("oci:{}", dir.display())
}

#[test]
fn layers_of_every_compression_merge_whatever_the_threads() {
    let home = Home::new();
    let dir = home.dir.path().join("oci");
    let mut l = Layout::new(&dir);
    let mut layers = Vec::new();
    for i in 0..60u8 {
        let t = tar(&[
            ("common", &[i; 10]),
            (&format!("own-{i}"), &noise(u64::from(i), 150_000)),
            (&format!(".wh.own-{}", i / 2), if i % 7 == 0 { b"" } else { b"x" }),
        ]);
        let blob = match i % 3 {
            0 => t.clone(),
            1 => gzip(&t),
            _ => zstd(&t),
        };
        layers.push((blob, t));
    }
    // The same layer again: common is back to what layer 10 says.
    layers.push(layers[10].clone());
    let image = l.image("linux/amd64", &layers);
    l.add(image, Some("latest"), None);
    l.finish();
    let mut identities = Vec::new();
    for threads in [1, 2, 5, 64] {
        let home = Home::new();
        let mut options = options();
        options.threads = threads;
        let imported = home.import_with(&oci(&dir), &options).unwrap();
        assert_eq!(imported.report.layers, 61);
        let image = home.opened();
        assert_eq!(image.content("/common"), [10; 10]);
        assert_eq!(image.content("/own-59"), noise(59, 150_000));
        assert_eq!(image.content("/own-10"), noise(10, 150_000), "the repeated layer brings it back");
        assert!(image.find("/own-20").is_none(), "layer 40 hides it");
        identities.push(imported.record.identity);
    }
    identities.dedup();
    assert_eq!(identities.len(), 1);
}

#[test]
fn the_record_keeps_config_and_origin() {
    let home = Home::new();
    let dir = home.dir.path().join("oci");
    plain_layout(&dir, &[tar(&[("a", b"x")])]);
    let mut options = options();
    options.now = 77;
    let imported = home.import_with(&format!("{}:latest", oci(&dir)), &options).unwrap();
    let record = home.store.image(&common::name("test")).unwrap();
    assert_eq!(record, imported.record);
    assert_eq!((record.created, record.files, record.names, record.content_bytes), (77, 1, 1, 1));
    assert_eq!(record.origin, format!("{}:latest", oci(&dir)));
    assert_eq!(record.config["config"]["Entrypoint"], json!(["/bin/x"]));
    assert_eq!(record.config["config"]["Labels"]["l"], "v");
}

#[test]
fn images_are_chosen_by_tag_and_platform() {
    let home = Home::new();
    let dir = home.dir.path().join("oci");
    let mut l = Layout::new(&dir);
    let t = |s: &str| tar(&[("which", s.as_bytes())]);
    let one = |l: &Layout<'_>, p: &str, s: &str| l.image(p, &[(t(s), t(s))]);
    let (amd, arm, plain) =
        (one(&l, "linux/amd64", "amd"), one(&l, "linux/arm64", "arm"), one(&l, "linux/amd64", "plain"));
    let with = |mut d: serde_json::Value, os: &str, arch: &str| {
        d["platform"] = json!({"os": os, "architecture": arch});
        d
    };
    let attestation = with(plain.clone(), "unknown", "unknown");
    let inner = json!({"schemaVersion": 2, "manifests": [with(arm, "linux", "arm64"), attestation, with(amd, "linux", "amd64")]});
    let inner = l.json("application/vnd.oci.image.index.v1+json", &inner);
    let outer = json!({"schemaVersion": 2, "manifests": [inner]});
    let outer = l.json("application/vnd.docker.distribution.manifest.list.v2+json", &outer);
    l.add(outer, Some("multi"), None);
    l.add(plain, Some("plain"), None);
    l.finish();
    let get = |tag: &str, platform: &str| {
        let mut o = options();
        o.platform = Platform::parse(platform).unwrap();
        home.import_with(&format!("{}{tag}", oci(&dir)), &o)
            .map(|_| String::from_utf8(home.opened().content("/which")).unwrap())
    };
    assert_eq!(get(":multi", "linux/amd64").unwrap(), "amd");
    assert_eq!(get(":multi", "linux/arm64").unwrap(), "arm");
    assert_eq!(get(":multi", "linux/arm64/v8").unwrap(), "arm");
    assert_eq!(get(":plain", "linux/amd64").unwrap(), "plain");
    let e = text(get(":multi", "linux/s390x").unwrap_err());
    assert!(e.contains("no image for linux/s390x; there is linux/amd64, linux/arm64; choose with --platform"), "{e}");
    let e = text(get(":plain", "linux/arm64").unwrap_err());
    assert!(e.contains("this image is for linux/amd64, wanted is linux/arm64"), "{e}");
    let e = text(get(":none", "linux/amd64").unwrap_err());
    assert!(e.contains("no image is called \"none\"; it has multi, plain"), "{e}");
    let e = text(get("", "linux/amd64").unwrap_err());
    assert!(e.contains("say which image, as oci:DIR:TAG; it has multi, plain"), "{e}");
    let e = text(home.import("oci:/no/such/dir").unwrap_err());
    assert!(e.contains("no such directory"), "{e}");
    let e = text(home.import(&oci(home.dir.path())).unwrap_err());
    assert!(e.contains("no index.json"), "{e}");
}

#[test]
fn indexes_do_not_nest_for_ever() {
    let home = Home::new();
    let dir = home.dir.path().join("oci");
    let mut l = Layout::new(&dir);
    let t = tar(&[("a", b"x")]);
    let mut descriptor = l.image("linux/amd64", &[(t.clone(), t)]);
    for depth in 0..6 {
        descriptor =
            l.json("application/vnd.oci.image.index.v1+json", &json!({"schemaVersion": 2, "manifests": [descriptor]}));
        if depth == 3 {
            l.add(descriptor.clone(), Some("four"), None);
        }
    }
    l.add(descriptor, Some("six"), None);
    l.finish();
    home.import(&format!("{}:four", oci(&dir))).unwrap();
    let e = home.import(&format!("{}:six", oci(&dir))).unwrap_err();
    assert!(matches!(e, ImportError::Limit { .. }), "{e}");
}

#[test]
fn attributes_that_cannot_be_kept_are_counted() {
    let home = Home::new();
    let mut b = ::tar::Builder::new(Vec::new());
    let records: [(&str, &[u8]); 5] = [
        ("SCHILY.xattr.user.kept", b"1"),
        ("SCHILY.xattr.system.nfs4_acl", b"2"),
        ("SCHILY.xattr.system.posix_acl_access", b"\x02\0\0\0"),
        ("SCHILY.acl.access", b"user::rw-"),
        ("RHT.security.selinux", b"x"),
    ];
    b.append_pax_extensions(records).unwrap();
    let mut h = ::tar::Header::new_ustar();
    h.set_size(0);
    h.set_mode(0o644);
    b.append_data(&mut h, "f", &b""[..]).unwrap();
    let path = home.dir.path().join("t.tar");
    std::fs::write(&path, b.into_inner().unwrap()).unwrap();
    let report = home.import(&format!("tar:{}", path.display())).unwrap().report;
    assert_eq!(report.dropped_xattrs, 3);
    let image = home.opened();
    let names: Vec<_> = image.xattrs(&image.find("/f").unwrap()).into_keys().collect();
    assert_eq!(names, [b"system.posix_acl_access".to_vec(), b"user.kept".to_vec()]);
}

#[test]
fn damage_is_named_and_leaves_nothing() {
    let big = tar(&[("a", &noise(1, 900_000))]);
    let flip = |path: &Path, at: usize| {
        let mut bytes = std::fs::read(path).unwrap();
        bytes[at] ^= 1;
        std::fs::write(path, bytes).unwrap();
    };
    for (packed, form) in [(big.clone(), "plain"), (gzip(&big), "gzip"), (zstd(&big), "zstd")] {
        let home = Home::new();
        let dir = home.dir.path().join("oci");
        let mut l = Layout::new(&dir);
        let image = l.image("linux/amd64", &[(packed.clone(), big.clone())]);
        let manifest = dir.join("blobs").join(image["digest"].as_str().unwrap().replace(':', "/"));
        l.add(image, None, None);
        l.finish();
        let blob = dir.join("blobs/sha256").join(sha256(&packed));
        // Whatever the damage does to the archive, the message says that the blob is damaged.
        for at in [0, 300, packed.len() / 2, packed.len() - 1] {
            flip(&blob, at);
            let e = home.import(&oci(&dir)).unwrap_err();
            assert!(matches!(e, ImportError::Mismatch { what: "digest", .. }), "{form} {at}: {e}");
            home.assert_untouched();
            flip(&blob, at);
        }
        for longer in [true, false] {
            let mut bytes = packed.clone();
            bytes.resize(if longer { bytes.len() + 1 } else { bytes.len() - 1 }, 0);
            std::fs::write(&blob, bytes).unwrap();
            let e = home.import(&oci(&dir)).unwrap_err();
            assert!(matches!(e, ImportError::Mismatch { what: "size", .. }), "{form}: {e}");
        }
        std::fs::remove_file(&blob).unwrap();
        let e = text(home.import(&oci(&dir)).unwrap_err());
        assert!(e.contains("its blob is missing"), "{e}");
        std::fs::write(&blob, &packed).unwrap();
        flip(&manifest, 5);
        let e = home.import(&oci(&dir)).unwrap_err();
        assert!(matches!(e, ImportError::Mismatch { what: "digest", .. }), "{e}");
        home.assert_untouched();
    }
}

#[test]
fn layouts_are_not_a_way_out() {
    let home = Home::new();
    let dir = home.dir.path().join("oci");
    let t = tar(&[("a", b"secret")]);
    plain_layout(&dir, std::slice::from_ref(&t));
    let blob = dir.join("blobs/sha256").join(sha256(&t));
    // Within the layout a link is fine: shared blob directories are made so.
    std::fs::rename(&blob, dir.join("elsewhere")).unwrap();
    std::os::unix::fs::symlink("../../elsewhere", &blob).unwrap();
    home.import(&oci(&dir)).unwrap();
    let outside = home.dir.path().join("outside");
    std::fs::rename(dir.join("elsewhere"), &outside).unwrap();
    for target in ["../../../outside".to_owned(), outside.display().to_string()] {
        std::fs::remove_file(&blob).unwrap();
        std::os::unix::fs::symlink(target, &blob).unwrap();
        let e = text(home.import(&oci(&dir)).unwrap_err());
        assert!(e.contains("not followed"), "{e}");
    }
    std::fs::remove_file(&blob).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &blob, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    let e = text(home.import(&oci(&dir)).unwrap_err());
    assert!(e.contains("not a regular file"), "{e}");
    for digest in ["sha256:../../../../etc/passwd", "md5:00", "sha256:AB", "../x"] {
        let index = json!({"schemaVersion": 2, "manifests": [{"digest": digest, "size": 1}]});
        std::fs::write(dir.join("index.json"), index.to_string()).unwrap();
        let e = text(home.import(&oci(&dir)).unwrap_err());
        assert!(e.contains("is not a sha256 or sha512 digest"), "{e}");
    }
}

#[test]
fn limits_are_kept() {
    let dir = tempfile::tempdir().unwrap();
    let t = tar(&[("one", &[1; 5000]), ("two", &[0; 200_000]), ("three", &noise(3, 100_000))]);
    plain_layout(dir.path(), &[t.clone(), tar(&[("x", b"")])]);
    type Change = fn(&mut lazyroot_import::Limits);
    let table: [(Change, &str); 8] = [
        (|l| l.layers = 1, "it has 2 layers, the limit is 1"),
        (|l| l.manifest_bytes = 100, "the limit on manifests and configs is 100"),
        (|l| l.layer_entries = 2, "more than 2 entries"),
        (|l| l.names = 2, "2 names"),
        (|l| l.layer_bytes = 1000, "unpacks to more than 1000 bytes"),
        (|l| l.unpacked_bytes = 50_000, "hold more than 50000 bytes"),
        (|l| l.file_bytes = 4999, "the limit is 4999"),
        (|l| l.sparse_bytes = 150_000, "holes included, add up to more than 150000 bytes"),
    ];
    for (change, want) in table {
        let home = Home::new();
        let mut options = options();
        change(&mut options.limits);
        let e = home.import_with(&oci(dir.path()), &options).unwrap_err();
        assert!(matches!(e, ImportError::Limit { .. }), "{e}");
        assert!(e.to_string().contains(want), "{e}");
        home.assert_untouched();
    }
    let bomb = dir.path().join("bomb.tar");
    std::fs::write(&bomb, zstd(&tar(&[("zeros", &vec![0; 4 << 20])]))).unwrap();
    let home = Home::new();
    let mut options = options();
    (options.limits.ratio, options.limits.ratio_from) = (100, 1 << 20);
    let e = home.import_with(&format!("tar:{}", bomb.display()), &options).unwrap_err();
    assert!(e.to_string().contains("more than 100 times its size"), "{e}");
    home.import(&format!("tar:{}", bomb.display())).unwrap();
}

#[test]
fn content_is_stored_once_and_zeros_never() {
    let home = Home::new();
    let path = |n: &str| home.dir.path().join(n);
    let data = noise(5, 1_000_000);
    std::fs::write(path("a.tar"), tar(&[("x", &data), ("y", &data[..65_536]), ("zeros", &[0; 300_000])])).unwrap();
    let first = home.import(&format!("tar:{}", path("a.tar").display())).unwrap();
    assert_eq!(first.report.duplicate_bytes, 65_536);
    assert!((1_000_000..1_010_000).contains(&first.report.stored_bytes), "{:?}", first.report);
    assert_eq!(home.opened().data_blocks("/zeros"), 0);
    assert_eq!(home.opened().content("/zeros"), [0; 300_000]);
    // The same again, and the same with a little more.
    let again = home.import(&format!("tar:{}", path("a.tar").display())).unwrap();
    assert_eq!((again.report.stored_bytes, again.report.duplicate_bytes), (0, 1_065_536));
    assert_eq!(again.record.identity, first.record.identity);
    assert_eq!(again.record.objects, first.record.objects);
    std::fs::write(path("b.tar"), tar(&[("x", &data), ("more", b"more")])).unwrap();
    let more = home.import(&format!("tar:{}", path("b.tar").display())).unwrap();
    assert_eq!(more.record.objects.len(), 2);
    assert!(more.report.stored_bytes < 4096);
    let image = home.opened();
    assert_eq!((image.content("/x"), image.content("/more")), (data, b"more".to_vec()));
}

/// What `docker save` wrote before version 25.
fn legacy_archive(layers: &[Vec<u8>]) -> Vec<u8> {
    let diff_ids: Vec<String> = layers.iter().map(|t| format!("sha256:{}", sha256(t))).collect();
    let config = json!({"os": "linux", "architecture": "amd64", "config": {"Cmd": ["sh"]}, "rootfs": {"type": "layers", "diff_ids": diff_ids}}).to_string();
    let config_name = format!("{}.json", sha256(config.as_bytes()));
    let mut b = ::tar::Builder::new(Vec::new());
    let mut names = Vec::new();
    for (i, t) in layers.iter().enumerate() {
        let name = format!("{i:064}/layer.tar");
        let mut h = ::tar::Header::new_gnu();
        match layers.iter().position(|u| u == t) {
            Some(first) if first < i => {
                h.set_entry_type(::tar::EntryType::Symlink);
                h.set_size(0);
                b.append_link(&mut h, &name, format!("../{first:064}/layer.tar")).unwrap();
            }
            _ => {
                h.set_size(t.len() as u64);
                b.append_data(&mut h, &name, &t[..]).unwrap();
            }
        }
        names.push(name);
    }
    let manifest = json!([{"Config": config_name, "RepoTags": ["img:1", "img:latest"], "Layers": names}]).to_string();
    for (name, data) in [(config_name.as_str(), &config), ("manifest.json", &manifest)] {
        let mut h = ::tar::Header::new_gnu();
        h.set_size(data.len() as u64);
        b.append_data(&mut h, name, data.as_bytes()).unwrap();
    }
    b.into_inner().unwrap()
}

#[test]
fn docker_archives_of_every_form() {
    let dir = tempfile::tempdir().unwrap();
    let layers = [tar(&[("a", &noise(1, 300_000))]), tar(&[("b", b"bee")]), tar(&[("a", &noise(1, 300_000))])];
    let oci_dir = dir.path().join("oci");
    plain_layout(&oci_dir, &layers);
    let mut b = ::tar::Builder::new(Vec::new());
    b.append_dir_all(".", &oci_dir).unwrap();
    let layout_in_tar = b.into_inner().unwrap();
    let legacy = legacy_archive(&layers);
    let forms = [
        ("legacy", legacy.clone()),
        ("legacy.gz", gzip(&legacy)),
        ("legacy.zst", zstd(&legacy)),
        ("layout", layout_in_tar),
    ];
    let mut identities = Vec::new();
    for (form, bytes) in &forms {
        let home = Home::new();
        let path = dir.path().join(form);
        std::fs::write(&path, bytes).unwrap();
        let imported = home.import(&format!("docker-archive:{}", path.display())).unwrap();
        assert_eq!(home.opened().content("/a"), noise(1, 300_000), "{form}");
        assert_eq!(home.opened().content("/b"), b"bee", "{form}");
        assert!(imported.record.config["config"].is_object(), "{form}");
        identities.push(imported.record.identity);
        let tag = if *form == "layout" { "latest" } else { "img" };
        home.import(&format!("docker-archive:{}:{tag}", path.display())).unwrap();
        let e = text(home.import(&format!("docker-archive:{}:other", path.display())).unwrap_err());
        assert!(e.contains("no image is called \"other\""), "{form}: {e}");
        std::fs::write(&path, &bytes[..bytes.len() * 2 / 3]).unwrap();
        assert!(home.import(&format!("docker-archive:{}", path.display())).is_err(), "{form}");
    }
    identities.dedup();
    assert_eq!(identities.len(), 1);
    let path = dir.path().join("rootfs.tar");
    std::fs::write(&path, &layers[0]).unwrap();
    let home = Home::new();
    let e = text(home.import(&format!("docker-archive:{}", path.display())).unwrap_err());
    assert!(e.contains("for a root file system use tar:"), "{e}");
    let mut damaged = legacy;
    damaged[2000] ^= 1;
    std::fs::write(&path, &damaged).unwrap();
    let e = home.import(&format!("docker-archive:{}", path.display())).unwrap_err();
    assert!(matches!(e, ImportError::Mismatch { what: "diff_id", .. }), "{e}");
    home.assert_untouched();
}

#[derive(Default)]
struct Listen(Mutex<Vec<Counts>>);

impl Progress for Listen {
    fn progress(&self, counts: &Counts) {
        self.0.lock().unwrap().push(*counts);
    }
}

#[test]
fn progress_reaches_its_total() {
    let dir = tempfile::tempdir().unwrap();
    let t = tar(&[("a", &noise(1, 3_000_000)), ("b", b"b")]);
    plain_layout(dir.path(), &[t.clone(), tar(&[("c", b"c")])]);
    let listen = Listen::default();
    let mut options = options();
    options.progress = &listen;
    let report = Home::new().import_with(&oci(dir.path()), &options).unwrap().report;
    let all = listen.0.lock().unwrap();
    let last = all.iter().max_by_key(|c| c.bytes).unwrap();
    assert_eq!(Some(last.bytes), last.total_bytes);
    assert_eq!(report.source_bytes, last.bytes);
    assert!(all.len() > 5);
    assert_eq!(all.iter().map(|c| c.files).max(), Some(3));
}

#[test]
fn plain_archives_in_every_compression() {
    let home = Home::new();
    let t = tar(&[("d/", b""), ("d/f", b"data")]);
    let mut identities = Vec::new();
    for (name, bytes) in [("a.tar", t.clone()), ("a.tgz", gzip(&t)), ("a.zst", zstd(&t))] {
        let path = home.dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        identities.push(home.import(&format!("tar:{}", path.display())).unwrap().record.identity);
    }
    identities.dedup();
    assert_eq!(identities.len(), 1);
    let path = home.dir.path().join("a.tgz");
    let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(b"garbage").unwrap();
    let e = text(home.import(&format!("tar:{}", path.display())).unwrap_err());
    assert!(e.contains("do not belong to it follow the gzip stream"), "{e}");
    let e = text(home.import("tar:/no/such/file").unwrap_err());
    assert!(e.contains("no such file"), "{e}");
    let e = text(home.import("tar:/").unwrap_err());
    assert!(e.contains("a directory"), "{e}");
}
