"""Names and link targets."""

from caselib import *  # noqa: F403


@case(
    "tar_non_utf8",
    "file, directory and link names that are not UTF-8, control characters, odd punctuation",
    why="Linux names are bytes except '/' and NUL; keep them exactly",
    seen=["vbatts/tar-split#18", "moby/moby#16516", "bootcrew/ubuntu-bootc#4", "andrewchambers/bupstash#304"],
)
def tar_non_utf8(c):
    names = [
        b"latin-\xe4",
        b"bad-\xff\xfe",
        b"new\nline",
        b"tab\there",
        b"back\\slash",
        b" lead",
        b"trail ",
        b"-dash",
        b"*star?",
        b"..hidden",
        b"...",
        b"%41",
        "snow\u2603".encode(),
        b"quote'\"",
        b"\x01ctl\x7f",
        b"a:b",
    ]
    c.simple(
        [f(n, n) for n in names]
        + [
            d(b"dir\xe9"),
            f(b"dir\xe9/in", "in"),
            l("to-latin", b"latin-\xe4"),
            h(b"hard\xe4", b"latin-\xe4"),
            f(b"raw-\xe4-gnu", "g", enc="gnu"),
        ]
    )


@case(
    "tar_case_unicode",
    "names that differ only in case or in Unicode normal form",
    why="Linux filesystems are byte-exact: all of them exist side by side",
    seen=["sleuthkit/sleuthkit#1979"],
)
def tar_case_unicode(c):
    c.simple(
        [
            f("Makefile", "1"),
            f("makefile", "2"),
            f("MAKEFILE", "3"),
            f("caf\u00e9", "nfc"),
            f("cafe\u0301", "nfd"),
            d("Dir"),
            d("dir"),
            f("Dir/x", "x"),
            f("dir/X", "X"),
            f("\u212a", "kelvin"),
            f("K", "k"),
            f("stra\u00dfe", "s"),
            f("STRASSE", "S"),
        ]
    )


@case(
    "tar_name_limits",
    "255-byte names (ASCII and multi-byte) and a path close to PATH_MAX",
    why="NAME_MAX 255 bytes, PATH_MAX 4096",
    seen=["google/gvisor#13050", "chatmail/core#7105"],
)
def tar_name_limits(c):
    L = [f("n" * 255, "255"), f("\u00e9" * 127 + "x", "mb"), d("D" * 255), f("D" * 255 + "/" + "m" * 255, "both")]
    p = ""
    for i in range(56):
        p += ("/" if p else "") + "deep%02d-" % i + "x" * 53
        L.append(d(p))
    L.append(f(p + "/leaf", "leaf\n"))
    c.simple(L)


@case(
    "tar_symlinks",
    "symlink targets of 1..4095 bytes around the 60-byte ext4 boundary; odd targets kept verbatim",
    why="ext4 fast symlink needs length < 60; readlink returns the exact bytes; st_size = length",
    seen=["bestouff/genext2fs#19", "tinylabscom/mvm#1785", "gkostka/lwext4#40", "dragonflyoss/nydus#2082"],
)
def tar_symlinks(c):
    L = [
        l("len%04d" % n, ("a" * 49 + "/") * (n // 50) + "b" * (n % 50))
        for n in (1, 31, 32, 58, 59, 60, 61, 64, 100, 101, 255, 256, 1000, 4000, 4095)
    ]
    L += [
        l("abs", "/usr/bin/x"),
        l("climb", "../../../../x"),
        l("dots", "././a//b/"),
        l("self", "self"),
        l("slash", "/"),
        l("space", " a b "),
        l("bytes", b"\xff\xfe"),
        l("nl", b"a\nb"),
    ]
    c.simple(L)
