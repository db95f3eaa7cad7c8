//! Extended attributes.

use crate::common::*;
use rustix::io::Errno;

#[test]
fn priv_extended_attributes() {
    if skip("priv_extended_attributes") {
        return;
    }
    let mut tree = MemTree::new();
    let f = tree.file(0, "f", vec![]);
    let capability = vec![1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    tree.at(f).xattrs = vec![
        (b"user.empty".to_vec(), vec![]),
        (b"user.big".to_vec(), pattern(60_000, 1)),
        (b"trusted.overlay.opaque".to_vec(), b"y".to_vec()),
        (b"security.capability".to_vec(), capability.clone()),
    ];
    tree.file(0, "plain", vec![]);
    let (_session, root) = serve(tree.finish());
    let get = |name: &str| {
        let mut buf = vec![0u8; 65_536];
        let n = rustix::fs::lgetxattr(root.join("f"), name, &mut buf[..])?;
        buf.truncate(n);
        Ok::<_, Errno>(buf)
    };
    assert_eq!(get("user.empty"), Ok(vec![]));
    assert_eq!(get("user.big"), Ok(pattern(60_000, 1)));
    assert_eq!(get("trusted.overlay.opaque"), Ok(b"y".to_vec()));
    assert_eq!(get("security.capability"), Ok(capability));
    assert_eq!(get("user.none"), Err(Errno::NODATA));
    let mut small = [0u8; 10];
    assert_eq!(rustix::fs::lgetxattr(root.join("f"), "user.big", &mut small[..]), Err(Errno::RANGE));
    assert_eq!(rustix::fs::lgetxattr_query(root.join("f"), "user.big"), Ok(60_000));
    let mut list = [0u8; 256];
    let n = rustix::fs::llistxattr(root.join("f"), &mut list[..]).unwrap();
    let names: Vec<_> = list[..n].split(|b| *b == 0).filter(|n| !n.is_empty()).collect();
    assert_eq!(names, [&b"user.empty"[..], b"user.big", b"trusted.overlay.opaque", b"security.capability"]);
    assert_eq!(rustix::fs::llistxattr(root.join("plain"), &mut list[..]), Ok(0));
}
