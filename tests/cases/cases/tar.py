"""Tar encodings, and what an entry may say."""

import os

from caselib import *  # noqa: F403

LONG = "d" * 60 + "/" + "e" * 60


@case(
    "tar_root_entry",
    "'./' entry sets the attributes of the root directory itself",
    why="GNU tar: ./ is the extraction root; " + SPEC + " lists ./ as an entry",
    seen=["google/go-containerregistry#2392", "AgentD/squashfs-tools-ng#22", "containers/storage#743"],
)
def tar_root_entry(c):
    c.simple(
        [
            d("./", 0o555, uid=0, gid=12, mtime_ns=1500000000 * NS, xattrs={"user.root": b"yes"}),
            f("./bin", "x"),
            d("./var", 0o1777),
        ]
    )


@case(
    "tar_abs_names",
    "member names with leading slashes and doubled or trailing slashes",
    why="GNU tar strips the leading '/'; repeated slashes are one",
    seen=["GoogleContainerTools/kaniko#2308", "google/go-containerregistry#2392"],
)
def tar_abs_names(c):
    c.simple([d("/etc"), f("/etc//passwd", "root\n"), d("opt//x//"), f("//opt/x/y", "y"), l("/abs", "/etc/passwd")])


@case(
    "tar_escape_dotdot",
    "../ members and a/../../ members",
    why="never write outside: refuse, drop, or confine to the image root",
    seen=["moby/moby#50568", "tinylabscom/mvm#233"],
)
def tar_escape_dotdot(c):
    up = "../" * 14 + "tmp/lz_case_canary_a"
    bad = [
        f("ok", "ok\n"),
        d("a"),
        f(up, "evil\n"),
        f("a/../../../../../../../../../../../../tmp/lz_case_canary_b", "evil\n"),
    ]
    c.image(bad)
    c.tree(
        "dropped",
        flatten([[f("ok", "ok\n"), d("a")]]),
    )
    c.tree(
        "confined",
        flatten([[f("ok", "ok\n"), d("a"), f("tmp/lz_case_canary_a", "evil\n"), f("tmp/lz_case_canary_b", "evil\n")]]),
    )
    c.expect("ok_or_reject")
    c.exp["must_not_exist"] = ["/tmp/lz_case_canary_a", "/tmp/lz_case_canary_b"]


@case(
    "tar_long_gnu",
    "GNU @LongLink (L and K) for long names and link targets",
    why="GNU tar format",
    seen=["containerd/overlaybd#174", "composefs/tar-rs#318"],
)
def tar_long_gnu(c):
    k = dict(enc="gnu")
    c.simple(
        [
            d("d" * 60, **k),
            d(LONG, **k),
            f(LONG + "/" + "f" * 100, "long\n", **k),
            l(LONG + "/lnk", "t" * 300, **k),
            h(LONG + "/hard" + "x" * 120, LONG + "/" + "f" * 100, **k),
        ]
    )


@case(
    "tar_long_pax",
    "PAX path/linkpath, including a ustar name field that disagrees",
    why="POSIX pax: extended header values override the ustar fields",
    seen=["composefs/tar-rs#318", "mafintosh/tar-stream#112"],
)
def tar_long_pax(c):
    p = LONG + "/" + "g" * 200
    c.simple(
        [
            d("d" * 60),
            d(LONG),
            f(p, "pax\n"),
            l(LONG + "/lnk", "u" * 500),
            h(LONG + "/h" + "y" * 150, p),
            f("real-name", "r\n", pax=[("path", "real-name")], hdr={"name": b"decoy/../../name"}),
            l("real-link", "real-target", pax=[("linkpath", "real-target")], hdr={"link": b"/decoy"}),
        ]
    )


@case(
    "tar_pax_size",
    "real size only in the PAX 'size' record, ustar size field 0",
    why="POSIX pax: size record overrides the header",
    seen=["adamhathcock/sharpcompress#919", "mafintosh/tar-stream#78"],
)
def tar_pax_size(c):
    body = blob("paxsize", 3000)
    c.simple([f("a", body, pax=[("size", len(body))], hdr={"size": 0}), f("after", "after\n")])


@case(
    "tar_pax_newline",
    "PAX value with embedded newlines that look like further records",
    why="POSIX pax: a record is as long as its leading length says",
    seen=["dragonflyoss/nydus#2064", "composefs/tar-rs#452", "jdx/mise#10978"],
)
def tar_pax_newline(c):
    evil = b"line1\n22 linkpath=/etc/evil\n19 path=smuggled.x\n"
    c.simple(
        [
            l("shim", "harmless", pax=[("comment", evil)]),
            f("file", "f\n", xattrs={"user.multi": b"a\nb\n12 path=zz\n"}),
            l("lfs", b"version x\noid y\nsize 3"),
        ]
    )


@case(
    "tar_pax_global",
    "git-archive style global header with a comment",
    why="POSIX pax: 'g' is metadata, never a file called pax_global_header",
    seen=["dragonflyoss/nydus#1734", "backdrop-ops/contrib#55"],
)
def tar_pax_global(c):
    g = pax_block([("comment", "0123456789abcdef0123456789abcdef01234567")], b"g", b"pax_global_header")
    c.simple(
        [
            E("g", "f", raw=g, model=False),
            d("src"),
            f("src/x", "x\n"),
            E("g", "f", raw=g, model=False),
            f("src/y", "y\n"),
        ]
    )


@case(
    "tar_mtime",
    "nanosecond, pre-1970, post-2038 and post-2106 mtimes, as PAX and as base-256",
    why="POSIX pax mtime is decimal seconds; -1.5 is sec=-2 nsec=500000000;"
    " ext4 (256-byte inodes), EROFS extended inodes and FUSE hold all of these",
    seen=["libarchive/libarchive#2562", "composefs/tar-rs#338", "koverstreet/bcachefs#743", "golang/go#11171"],
)
def tar_mtime(c):
    v = {
        "ns": 1700000000123456789,
        "one_ns": 1,
        "neg": -1500000000,
        "neg_whole": -100 * NS,
        "neg_tiny": -1,
        "y2038": 2147483648 * NS + 1,
        "y2100": 4102444800 * NS + 999999999,
        "y2106": 4294967296 * NS + 5,
        "zero": 0,
    }
    L = [f(k, k, mtime_ns=t) for k, t in v.items()]
    L += [d("dir", mtime_ns=-2 * NS + 250000000), l("sym", "x", mtime_ns=5000000000 * NS + 7)]
    L += [
        f("b256neg", "b", mtime_ns=-12345 * NS, enc="gnu"),
        f("b256pos", "b", mtime_ns=9000000000 * NS, enc="gnu", hdr={"force256": ["mtime"]}),
    ]
    c.simple(L)


@case(
    "tar_big_ids",
    "uids/gids beyond 16 and 21 bits: PAX and base-256",
    why="32-bit uid_t; EROFS compact inodes hold 16 bits only, so these need extended inodes",
    seen=["dragonflyoss/nydus#1387", "hpc/charliecloud#1573", "kjd/idna#123"],
)
def tar_big_ids(c):
    ids = [65534, 65535, 65536, 70000, 2097151, 2097152, 1000240000, 2147483648, 4294967294]
    L = [f("pax%d" % i, "x", uid=v, gid=ids[-1 - i]) for i, v in enumerate(ids)]
    L += [f("gnu%d" % i, "x", uid=v, gid=v, enc="gnu") for i, v in enumerate(ids)]
    L += [d("dir", uid=4294967294, gid=4294967294), l("sym", "x", uid=100000, gid=2147483648)]
    c.simple(L)


@case(
    "tar_modes",
    "setuid, setgid, sticky, 0000 and modes stored with file type bits",
    why="st_mode & 07777 must come back unchanged for every type",
    seen=["containerd/stargz-snapshotter#68", "containerd/stargz-snapshotter#286", "kopia/kopia#2597"],
)
def tar_modes(c):
    L = [f("m%04o" % m, "x", mode=m) for m in (0, 0o001, 0o200, 0o4755, 0o2755, 0o6711, 0o1644, 0o7777)]
    L += [d("d%04o" % m, m) for m in (0, 0o1777, 0o2775, 0o3777, 0o7000)]
    L += [f("typed", "x", mode=0o4750, hdr={"mode": 0o104750}), d("typedd", 0o1711, hdr={"mode": 0o041711})]
    L += [E("fifo", "p", mode=0o2660)]
    c.simple(L)


@case(
    "tar_devices",
    "char/block devices with small and large major/minor numbers, fifo",
    why=SPEC + ": File Types; Linux dev_t is 12+20 bits",
    seen=["vmware/vic#5714", "dragonflyoss/nydus#2045"],
)
def tar_devices(c):
    c.simple(
        [
            d("dev"),
            E("dev/null", "c", mode=0o666, dev=(1, 3)),
            E("dev/sda", "b", mode=0o660, gid=6, dev=(8, 0)),
            E("dev/big", "b", dev=(259, 70000)),
            E("dev/max", "c", mode=0o600, dev=(4095, 1048575)),
            E("dev/m256", "c", dev=(10, 256)),
            E("dev/fifo", "p", mode=0o600),
        ]
    )


@case(
    "tar_chr00",
    "a real character device 0:0 inside the image (nested overlay whiteout)",
    why="it is file content of the image: a flattened mount must show a 0:0 device, not hide it",
    seen=["composefs/composefs#172", "composefs/composefs#175", "ostreedev/ostree#2712"],
)
def tar_chr00(c):
    c.simple(
        [
            d("var"),
            d("var/lib"),
            f("var/lib/stay", "s\n"),
            E("var/lib/wh", "c", mode=0, dev=(0, 0)),
            E("var/lib/wh2", "c", mode=0o600, uid=9, dev=(0, 0)),
        ]
    )
    c.not_through("overlay", "overlayfs takes a 0:0 character device for a whiteout")



@case(
    "tar_no_eof",
    "archive that ends without zero blocks (and one with a single zero block and trailing garbage)",
    why="GNU tar and Go read it; data after the end marker is ignored",
    seen=["MonetDB/MonetDB#6876", "firedancer-io/firedancer#9632"],
)
def tar_no_eof(c):
    L1, L2 = [d("a"), f("a/x", "x\n")], [f("a/y", blob("noeof", 1000))]
    c.image(Layer(tar_bytes(L1, eof=False)), Layer(tar_bytes(L2) + b"\0" * 512 * 17 + b"junk" * 128), tar=False)
    c.tree("primary", flatten([L1, L2]))


@case(
    "tar_empty_layers",
    "empty layers: 0 bytes, 1024 NULs, 10240 NULs, one with only './'",
    why="valid images in the wild; a layer without entries changes nothing",
    seen=["moby/moby#18226", "google/go-containerregistry#367", "bazelbuild/rules_docker#1392", "tern-tools/tern#674"],
)
def tar_empty_layers(c):
    L = [d("a"), f("a/x", "x\n")]
    dot = [d("./", 0o750)]
    c.image(
        Layer(b"", "none"),
        Layer(b"\0" * 1024),
        Layer(tar_bytes(L)),
        Layer(b"\0" * 10240),
        Layer(tar_bytes(dot)),
        tar=False,
    )
    c.tree("primary", flatten([[], [], L, [], dot]))
    c.note("the first layer blob is zero bytes long (sha256 e3b0c442...)")


@case(
    "tar_ustar_v7",
    "names split into prefix and name (ustar), and headers without a magic (v7)",
    why="POSIX ustar interchange format; V7 tar",
)
def tar_ustar_v7(c):
    deep = "p" * 80 + "/" + "q" * 70
    c.simple(
        [
            d("p" * 80, enc="ustar"),
            d(deep, enc="ustar"),
            f(deep + "/leaf", "leaf\n", enc="ustar"),
            f("old", "old\n", enc="v7", uid=5, gid=6, mode=0o640),
            l("old-link", "old", enc="v7"),
            h("old-hard", "old", enc="v7", uid=5, gid=6, mode=0o640),
            d("old-dir", 0o750, enc="v7"),
        ]
    )


@case(
    "tar_docker_archive",
    "three layers with whiteouts, also as `docker save` writes them",
    why="docker image specification v1.2; " + SPEC,
)
def tar_docker_archive(c):
    c.simple(
        base(),
        [wh("etc/.wh.gone"), f("etc/new", "n\n")],
        [d("etc/sub"), wh("etc/sub/.wh..wh..opq"), f("etc/sub/y", "y\n")],
        docker=True,
    )


@case(
    "tar_nested_index",
    "an index in the index, with a manifest for another platform first",
    why="image-spec image-index.md: platform",
)
def tar_nested_index(c):
    c.simple([f("right", "amd64\n")], tar=False)
    nest_index(os.path.join(c.out, "oci"), Layer(tar_bytes([f("wrong", "arm64\n")])))
