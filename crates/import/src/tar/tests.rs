use super::*;
use proptest::prelude::*;
use std::io::Write;

const LIMITS: TarLimits = TarLimits { header_bytes: 1 << 20, sparse_pieces: 1000, file_bytes: 1 << 44 };

/// A parsed entry and its data: pieces at their offsets.
#[derive(Debug, PartialEq, Eq, Clone, Default)]
struct Got {
    kind: EntryKind,
    path: Vec<u8>,
    link: Vec<u8>,
    mode: u16,
    uid: u32,
    gid: u32,
    mtime: (i64, u32),
    device: (u32, u32),
    size: u64,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    data: Vec<(u64, Vec<u8>)>,
}

fn parse_in_steps(bytes: &[u8], step: usize) -> Result<Vec<Got>, TarError> {
    let mut parser = Parser::new(LIMITS);
    let mut out: Vec<Got> = Vec::new();
    let mut ended = false;
    // The empty last step lets a file of size 0 at the very end come out.
    for chunk in bytes.chunks(step.max(1)).chain([&b""[..]]) {
        let mut input = chunk;
        loop {
            match parser.step(&mut input)? {
                Event::NeedMore => {
                    assert!(input.is_empty());
                    break;
                }
                Event::End => {
                    ended = true;
                    break;
                }
                Event::Entry => {
                    let e = parser.entry_mut();
                    out.push(Got {
                        kind: e.kind,
                        path: e.path.clone(),
                        link: e.link.clone(),
                        mode: e.mode,
                        uid: e.uid,
                        gid: e.gid,
                        mtime: (e.mtime_sec, e.mtime_nsec),
                        device: (e.major, e.minor),
                        size: e.size,
                        xattrs: e.xattrs.clone(),
                        data: Vec::new(),
                    });
                }
                Event::Data { offset, bytes } => {
                    let got = out.last_mut().unwrap();
                    match got.data.last_mut() {
                        Some((at, have)) if *at + have.len() as u64 == offset => have.extend_from_slice(bytes),
                        _ => got.data.push((offset, bytes.to_vec())),
                    }
                }
                Event::EntryEnd => {}
            }
        }
        if ended {
            break;
        }
    }
    parser.finish()?;
    Ok(out)
}

/// The same whatever the steps.
fn parse(bytes: &[u8]) -> Result<Vec<Got>, TarError> {
    let whole = parse_in_steps(bytes, usize::MAX >> 1);
    for step in [1, 511, 512, 513, 4096] {
        assert_eq!(parse_in_steps(bytes, step), whole, "step {step}");
    }
    whole
}

struct Head<'a> {
    name: &'a [u8],
    flag: u8,
    size: u64,
    magic: &'a [u8],
    edits: &'a [(usize, &'a [u8])],
}

impl Default for Head<'_> {
    fn default() -> Self {
        Head { name: b"f", flag: b'0', size: 0, magic: b"ustar\x0000", edits: &[] }
    }
}

fn header(h: &Head<'_>) -> Vec<u8> {
    let mut b = vec![0u8; BLOCK];
    b[..h.name.len()].copy_from_slice(h.name);
    b[100..108].copy_from_slice(b"0000644\0");
    b[108..116].copy_from_slice(b"0000001\0");
    b[116..124].copy_from_slice(b"0000002\0");
    b[124..136].copy_from_slice(format!("{:011o}\0", h.size).as_bytes());
    b[136..148].copy_from_slice(b"00000000003\0");
    b[156] = h.flag;
    b[257..257 + h.magic.len()].copy_from_slice(h.magic);
    for (at, bytes) in h.edits {
        b[*at..*at + bytes.len()].copy_from_slice(bytes);
    }
    seal(&mut b);
    b
}

fn seal(b: &mut [u8]) {
    b[148..156].fill(b' ');
    let sum: u32 = b.iter().map(|&b| u32::from(b)).sum();
    b[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut v = bytes.to_vec();
    v.resize(v.len().next_multiple_of(BLOCK), 0);
    v
}

fn entry(h: &Head<'_>, data: &[u8]) -> Vec<u8> {
    [
        header(&Head { size: data.len() as u64, name: h.name, flag: h.flag, magic: h.magic, edits: h.edits }),
        padded(data),
    ]
    .concat()
}

fn pax(flag: u8, records: &[(&[u8], &[u8])]) -> Vec<u8> {
    let mut body = Vec::new();
    for (k, v) in records {
        let rest = k.len() + v.len() + 3;
        let mut len = rest + 1;
        while len.to_string().len() + rest != len {
            len = len.to_string().len() + rest;
        }
        body.extend_from_slice(format!("{len} ").as_bytes());
        body.extend_from_slice(&[k, &b"="[..], v, b"\n"].concat());
    }
    entry(&Head { name: b"PaxHeaders/x", flag, ..Head::default() }, &body)
}

fn file(name: &[u8], data: &[u8]) -> Vec<u8> {
    entry(&Head { name, ..Head::default() }, data)
}

const END: [u8; 1024] = [0; 1024];

#[test]
fn ends_of_archives() {
    let whole = [file(b"a", b"hello"), END.to_vec()].concat();
    assert_eq!(parse(&whole).unwrap().len(), 1);
    for empty in [0, 512, 1024, 10240, 100] {
        assert_eq!(parse(&vec![0; empty]).unwrap(), []);
    }
    let no_end = file(b"a", b"hello");
    assert_eq!(parse(&no_end).unwrap()[0].data, [(0, b"hello".to_vec())]);
    let no_padding = &no_end[..517];
    assert_eq!(parse(no_padding).unwrap()[0].data, [(0, b"hello".to_vec())]);
    let junk = [&no_end[..], &[0; 512], &[b'j'; 700]].concat();
    assert_eq!(parse(&junk).unwrap().len(), 1);
    for (cut, offset) in [(516, 516), (513, 513), (512, 512), (100, 100)] {
        let e = parse(&no_end[..cut]).unwrap_err();
        assert!(matches!(e.why, Why::Truncated(_)), "{cut}: {e}");
        assert_eq!(e.offset, offset);
    }
    let orphan = pax(b'x', &[(b"path", b"p")]);
    for tail in [0, 1024] {
        let e = parse(&[&orphan[..], &END[..tail]].concat()).unwrap_err();
        assert!(matches!(e.why, Why::Truncated(_)), "{e}");
    }
    assert_eq!(parse(&pax(b'g', &[(b"comment", b"c")])).unwrap(), []);
    let e = parse(&[file(b"a", b""), vec![b'x'; 512]].concat()).unwrap_err();
    assert_eq!((e.why, e.offset), (Why::Checksum, 512));
}

#[test]
fn names_come_from_the_strongest_source() {
    let long = |flag, name: &[u8]| {
        entry(&Head { name: b"././@LongLink", flag, magic: b"ustar  \0", ..Head::default() }, &[name, b"\0"].concat())
    };
    let table: [(Vec<u8>, &[u8]); 6] = [
        (file(b"plain", b""), b"plain"),
        (entry(&Head { name: b"rest", edits: &[(345, b"some/prefix")], ..Head::default() }, b""), b"some/prefix/rest"),
        (
            entry(
                &Head { name: b"rest", magic: b"ustar  \0", edits: &[(345, b"not a prefix")], ..Head::default() },
                b"",
            ),
            b"rest",
        ),
        ([pax(b'x', &[(b"path", b"from pax")]), file(b"decoy", b"")].concat(), b"from pax"),
        ([pax(b'x', &[(b"path", b"")]), file(b"kept", b"")].concat(), b"kept"),
        ([long(b'L', &[b'n'; 300]), file(b"nnn", b"")].concat(), &[b'n'; 300]),
    ];
    for (bytes, want) in table {
        assert_eq!(parse(&bytes).unwrap()[0].path, want);
    }
    let e = [pax(b'x', &[(b"path", b"a\0b")]), file(b"a", b"")].concat();
    assert_eq!(parse(&e).unwrap_err().why, Why::Nul);
    let link = entry(&Head { name: b"l", flag: b'2', edits: &[(157, b"short")], ..Head::default() }, b"");
    let link = [long(b'K', &[b't'; 200]), link, file(b"next", b"")].concat();
    let got = parse(&link).unwrap();
    assert_eq!((&got[0].link[..], &got[1].link[..]), (&[b't'; 200][..], &b""[..]));
}

#[test]
fn types() {
    let one = |flag, name: &[u8], data: &[u8]| {
        parse(&entry(
            &Head { name, flag, edits: &[(157, b"to"), (329, b"0000010\0"), (337, b"0000400\0")], ..Head::default() },
            data,
        ))
    };
    for (flag, kind) in [
        (b'0', EntryKind::File),
        (0, EntryKind::File),
        (b'7', EntryKind::File),
        (b'1', EntryKind::HardLink),
        (b'2', EntryKind::Symlink),
        (b'3', EntryKind::Char),
        (b'4', EntryKind::Block),
        (b'5', EntryKind::Dir),
        (b'6', EntryKind::Fifo),
    ] {
        let got = &one(flag, b"n", b"").unwrap()[0];
        assert_eq!(got.kind, kind);
        let device = matches!(kind, EntryKind::Char | EntryKind::Block);
        assert_eq!(got.device, if device { (8, 256) } else { (0, 0) });
        assert_eq!(got.link.is_empty(), !matches!(kind, EntryKind::HardLink | EntryKind::Symlink));
    }
    assert_eq!(one(b'0', b"dir/", b"").unwrap()[0].kind, EntryKind::Dir);
    // A label and a GNU directory listing have data that is nobody's file.
    assert_eq!(one(b'V', b"label", b"").unwrap(), []);
    let dump = [entry(&Head { name: b"d", flag: b'D', ..Head::default() }, b"Yfile\0"), file(b"x", b"1")].concat();
    assert_eq!(parse(&dump).unwrap().len(), 2);
    // Others may carry a size that means nothing.
    let lie = [header(&Head { flag: b'5', size: 4096, ..Head::default() }), file(b"x", b"1")].concat();
    assert_eq!(parse(&lie).unwrap()[1].path, b"x");
    assert_eq!(one(b'M', b"x", b"").unwrap_err().why, Why::Type('M'));
}

#[test]
fn pax_records_override_and_do_not_leak() {
    let records: &[(&[u8], &[u8])] = &[
        (b"uid", b"4294967294"),
        (b"gid", b"-2"),
        (b"mtime", b"-1.5"),
        (b"size", b"4"),
        (b"SCHILY.xattr.user.a", b"\0\n="),
        (b"SCHILY.xattr.user.empty", b""),
        (b"SCHILY.xattr.user.a", b"again"),
        (b"comment", b"22 linkpath=/etc/evil\n19 path=smuggled.x\n"),
    ];
    let bytes = [pax(b'x', records), header(&Head::default()), padded(b"data"), file(b"next", b"n")].concat();
    let got = parse(&bytes).unwrap();
    assert_eq!((got[0].uid, got[0].gid, got[0].mtime), (4294967294, 4294967294, (-2, 500_000_000)));
    assert_eq!(got[0].data, [(0, b"data".to_vec())]);
    assert_eq!(got[0].path, b"f");
    assert_eq!(got[0].xattrs, [(b"user.a".to_vec(), b"again".to_vec()), (b"user.empty".to_vec(), vec![])]);
    assert_eq!((got[1].uid, got[1].gid, got[1].mtime, got[1].xattrs.len()), (1, 2, (3, 0), 0));
}

#[test]
fn global_records() {
    let bytes = [
        pax(b'g', &[(b"mtime", b"77"), (b"uid", b"5")]),
        pax(b'x', &[(b"uid", b"6")]),
        file(b"a", b""),
        file(b"b", b""),
    ]
    .concat();
    let got = parse(&bytes).unwrap();
    assert_eq!((got[0].uid, got[0].mtime.0, got[1].uid, got[1].mtime.0), (6, 77, 5, 77));
    for key in [&b"path"[..], b"linkpath", b"size", b"SCHILY.xattr.user.a", b"GNU.sparse.major"] {
        let e = parse(&[pax(b'g', &[(key, b"1")]), file(b"a", b"")].concat()).unwrap_err();
        assert!(matches!(e.why, Why::Global(_)), "{e}");
    }
}

#[test]
fn sparse_forms_agree() {
    let want = vec![(512, b"mid!".repeat(128)), (2048, b"tail".to_vec())];
    let data: Vec<u8> = want.iter().flat_map(|(_, d)| d.clone()).collect();
    let v00 = pax(
        b'x',
        &[
            (b"GNU.sparse.size", b"4000"),
            (b"GNU.sparse.numblocks", b"2"),
            (b"GNU.sparse.offset", b"512"),
            (b"GNU.sparse.numbytes", b"512"),
            (b"GNU.sparse.offset", b"2048"),
            (b"GNU.sparse.numbytes", b"4"),
        ],
    );
    let v01 = pax(
        b'x',
        &[(b"GNU.sparse.size", b"4000"), (b"GNU.sparse.map", b"512,512,2048,4,4000,0"), (b"GNU.sparse.name", b"f")],
    );
    let v10 = pax(
        b'x',
        &[
            (b"GNU.sparse.major", b"1"),
            (b"GNU.sparse.minor", b"0"),
            (b"GNU.sparse.name", b"f"),
            (b"GNU.sparse.realsize", b"4000"),
        ],
    );
    let map = padded(b"3\n512\n512\n2048\n4\n4000\n0\n");
    let decoy = Head { name: b"GNUSparseFile.0/f", ..Head::default() };
    let mut old = header(&Head {
        name: b"f",
        flag: b'S',
        size: data.len() as u64,
        magic: b"ustar  \0",
        edits: &[
            (386, b"00000001000\x0000000001000\0"),
            (410, b"00000004000\x0000000000004\0"),
            (483, b"00000007640\0"),
        ],
    });
    let plain_old = [old.clone(), padded(&data)].concat();
    old[482] = 1;
    old[410..434].fill(0);
    seal(&mut old);
    let mut extension = vec![0; 512];
    extension[..24].copy_from_slice(b"00000004000\x0000000000004\0");
    let archives = [
        [v00, file(b"f", &data)].concat(),
        [v01, entry(&decoy, &data)].concat(),
        [v10.clone(), entry(&decoy, &[map, data.clone()].concat())].concat(),
        plain_old,
        [old, extension, padded(&data)].concat(),
    ];
    for (i, bytes) in archives.iter().enumerate() {
        let got = parse(&[&bytes[..], &file(b"after", b"after")].concat()).unwrap();
        assert_eq!((&got[0].path[..], got[0].size, &got[0].data), (&b"f"[..], 4000, &want), "form {i}");
        assert_eq!(got[1].data, [(0, b"after".to_vec())], "form {i}");
    }
    let huge = (LIMITS.sparse_pieces + 1).to_string();
    let maps: [&[u8]; 7] = [
        b"1\n0\n4\n",
        b"2\n2048\n512\n512\n4\n",
        b"1\n3999\n516\n",
        b"x\n",
        b"1\n18446744073709551615\n516\n",
        &[huge.as_bytes(), b"\n"].concat(),
        b"99999999999999999999999\n",
    ];
    for map in maps {
        let e = parse(&[v10.clone(), entry(&decoy, &[padded(map), data.clone()].concat())].concat()).unwrap_err();
        assert!(matches!(e.why, Why::Sparse(_) | Why::Limit { .. }), "{e}");
    }
    let endless = [v10, entry(&decoy, b"2\n1\n")].concat();
    assert!(parse(&endless).is_err());
}

#[test]
fn limits() {
    let big = header(&Head {
        edits: &[(124, &[0x80, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff])],
        ..Head::default()
    });
    assert!(matches!(parse(&big).unwrap_err().why, Why::Limit { .. }));
    let long = header(&Head { flag: b'L', size: (1 << 20) + 1, ..Head::default() });
    assert!(matches!(parse(&long).unwrap_err().why, Why::Limit { .. }));
    let negative = header(&Head { edits: &[(124, &[0xff; 12])], ..Head::default() });
    assert_eq!(parse(&negative).unwrap_err().why, Why::Number("size"));
    let device = header(&Head { flag: b'3', edits: &[(329, b"0010000\0")], ..Head::default() });
    assert!(matches!(parse(&device).unwrap_err().why, Why::Number(_)));
    let e = parse(&[pax(b'x', &[(b"uid", b"4294967295")]), file(b"who", b"")].concat()).unwrap_err();
    assert_eq!(e.entry.as_deref(), Some("who"));
}

#[test]
fn data_can_be_skipped() {
    let bytes = [file(b"a", &[1; 1000]), file(b"b", &[2; 10])].concat();
    let mut parser = Parser::new(LIMITS);
    let mut input = &bytes[..600];
    assert_eq!(parser.step(&mut input).unwrap(), Event::Entry);
    assert_eq!(parser.position(), 512);
    assert_eq!(parser.skip_data(), 1000);
    assert_eq!(parser.position(), 1512);
    let mut input = &bytes[1512..];
    assert_eq!(parser.step(&mut input).unwrap(), Event::EntryEnd);
    assert_eq!(parser.step(&mut input).unwrap(), Event::Entry);
    assert_eq!(parser.entry_mut().path, b"b");
}

#[test]
fn the_saved_corpus_of_the_fuzzer() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/tar");
    let mut count = 0;
    for file in std::fs::read_dir(dir).unwrap() {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        crate::fuzz_archive(&bytes);
        for cut in (0..bytes.len()).step_by(97) {
            crate::fuzz_archive(&bytes[..cut]);
        }
        count += 1;
    }
    assert!(count >= 10);
}

/// What other tools write.
#[derive(Debug, Clone)]
struct Item {
    name: String,
    kind: u8,
    data: Vec<u8>,
    mode: u32,
    id: u64,
    mtime: u64,
    xattr: Option<(String, Vec<u8>)>,
}

fn items() -> impl Strategy<Value = Vec<Item>> {
    // The writer normalises paths, so these are normal.
    let name = proptest::collection::vec("[a-zA-Zä _-][a-zA-Zä ._-]{0,30}", 1..8).prop_map(|parts| parts.join("/"));
    let item = (
        name,
        0u8..5,
        proptest::collection::vec(any::<u8>(), 0..2000),
        0u32..0o10000,
        0u64..0o7777777,
        0u64..0o77777777777,
        proptest::option::of((
            "user\\.[a-z=]{1,20}".prop_map(|s| s.replace('=', "x")),
            proptest::collection::vec(any::<u8>(), 0..200),
        )),
    )
        .prop_map(|(name, kind, data, mode, id, mtime, xattr)| Item { name, kind, data, mode, id, mtime, xattr });
    proptest::collection::vec(item, 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn archives_of_the_tar_crate(items in items(), step in 1usize..3000) {
        let mut builder = ::tar::Builder::new(Vec::new());
        for i in &items {
            if let Some((k, v)) = &i.xattr {
                builder.append_pax_extensions([(format!("SCHILY.xattr.{k}").as_str(), &v[..])]).unwrap();
            }
            let mut h = ::tar::Header::new_gnu();
            h.set_mode(i.mode);
            h.set_uid(i.id);
            h.set_gid(i.id / 2);
            h.set_mtime(i.mtime);
            h.set_size(0);
            match i.kind {
                0 => {
                    h.set_size(i.data.len() as u64);
                    h.set_entry_type(::tar::EntryType::Regular);
                    builder.append_data(&mut h, &i.name, &i.data[..]).unwrap();
                }
                1 => {
                    h.set_entry_type(::tar::EntryType::Directory);
                    builder.append_data(&mut h, &i.name, &b""[..]).unwrap();
                }
                2 | 3 => {
                    h.set_entry_type(if i.kind == 2 { ::tar::EntryType::Symlink } else { ::tar::EntryType::Link });
                    builder.append_link(&mut h, &i.name, format!("to/{}", i.name)).unwrap();
                }
                _ => {
                    h.set_entry_type(::tar::EntryType::Fifo);
                    builder.append_data(&mut h, &i.name, &b""[..]).unwrap();
                }
            }
        }
        let bytes = builder.into_inner().unwrap();
        let got = parse_in_steps(&bytes, step).unwrap();
        prop_assert_eq!(got.len(), items.len());
        for (g, i) in got.iter().zip(&items) {
            prop_assert_eq!(&g.path, i.name.as_bytes());
            prop_assert_eq!(u32::from(g.mode), i.mode);
            prop_assert_eq!((u64::from(g.uid), u64::from(g.gid)), (i.id, i.id / 2));
            prop_assert_eq!(g.mtime, (i.mtime as i64, 0));
            let kinds = [EntryKind::File, EntryKind::Dir, EntryKind::Symlink, EntryKind::HardLink, EntryKind::Fifo];
            prop_assert_eq!(g.kind, kinds[usize::from(i.kind)]);
            let data = if i.kind == 0 { &i.data[..] } else { b"" };
            prop_assert_eq!(g.data.iter().flat_map(|d| d.1.clone()).collect::<Vec<u8>>(), data);
            let want: Vec<_> = i.xattr.iter().map(|(k, v)| (k.clone().into_bytes(), v.clone())).collect();
            prop_assert_eq!(&g.xattrs, &want);
        }
    }

    #[test]
    fn damage_never_panics(items in items(), at in any::<prop::sample::Index>(), with in any::<u8>(), cut in any::<prop::sample::Index>(), reseal in any::<bool>()) {
        let mut bytes = Vec::new();
        for i in &items {
            if let Some((k, v)) = &i.xattr {
                bytes.extend_from_slice(&pax(b'x', &[(format!("SCHILY.xattr.{k}").as_bytes(), v), (b"GNU.sparse.map", b"0,1"), (b"GNU.sparse.size", b"9")]));
            }
            bytes.write_all(&entry(&Head { name: &i.name.as_bytes()[..i.name.len().min(100)], flag: b"0S5xL"[usize::from(i.kind)], ..Head::default() }, &i.data)).unwrap();
        }
        if !bytes.is_empty() {
            let at = at.index(bytes.len());
            bytes[at] = with;
            let block = at / BLOCK * BLOCK;
            if reseal {
                seal(&mut bytes[block..block + BLOCK]);
            }
            bytes.truncate(cut.index(bytes.len()).max(bytes.len() / 2));
        }
        let _ = parse_in_steps(&bytes, 700);
    }
}
