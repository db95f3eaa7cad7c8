"""Whiteouts: what a later layer removes."""

from caselib import *  # noqa: F403


@case(
    "wh_file",
    "plain whiteout removes one lower file and is itself hidden",
    why=SPEC + ": Whiteouts",
    seen=["containerd/containerd#13030", "rancher/elemental-toolkit#599"],
)
def wh_file(c):
    c.simple(base(), [d("etc"), wh("etc/.wh.gone")])


@case(
    "wh_dir",
    "whiteout of a directory removes the whole subtree",
    why=SPEC + ": Whiteouts",
    seen=["google/go-containerregistry#1897"],
)
def wh_dir(c):
    c.simple(base(), [wh("etc/.wh.sub")])


@case(
    "wh_opaque_last",
    "opaque marker listed after the new siblings hides only lower content",
    why=SPEC + ": a/.wh..wh..opq is applied first whatever its position",
    seen=["opencontainers/umoci#224", "octasoft-ltd/wsl-ui#114"],
)
def wh_opaque_last(c):
    c.simple(
        [d("a"), d("a/b"), d("a/b/c"), f("a/b/c/bar", "old\n"), f("a/top", "old\n")],
        [d("a"), d("a/b"), d("a/b/c"), f("a/b/c/foo", "new\n"), f("a/top2", "new\n"), wh("a/.wh..wh..opq")],
    )


@case(
    "wh_after_add",
    "whiteout and a new file of that name in the same layer, whiteout last",
    why=SPEC + ": whiteouts apply to lower layers only",
    seen=["opencontainers/umoci#232"],
)
def wh_after_add(c):
    c.simple(
        base(),
        [
            d("etc"),
            f("etc/gone", "new life\n", mode=0o600),
            wh("etc/.wh.gone"),
            d("etc/sub"),
            f("etc/sub/y", "y\n"),
            wh("etc/.wh.sub"),
        ],
    )
    c.note("etc/sub is deleted below and re-created here: x must be gone, y must exist")


@case(
    "wh_readd_later",
    "deleted in layer 2, added again in layer 3",
    why=SPEC + ": layers are applied one after the other",
    seen=["kernel/hypeman#94"],
)
def wh_readd_later(c):
    c.simple(
        base(),
        [wh("etc/.wh.gone"), wh("etc/.wh.sub")],
        [f("etc/gone", "third\n"), d("etc/sub", 0o700), f("etc/sub/z", "z\n")],
    )


@case(
    "wh_symlink_itself",
    "whiteout of a symlink removes the link, not what it points to",
    why=SPEC + ": a whiteout names a path to be deleted (unlink(2) semantics)",
    seen=["apptainer/singularity#1605"],
)
def wh_symlink_itself(c):
    c.simple(
        [d("etc"), d("usr"), f("usr/tz", "UTC\n"), l("etc/localtime", "/usr/tz"), l("etc/d", "../usr")],
        [wh("etc/.wh.localtime"), wh("etc/.wh.d")],
    )


@case(
    "wh_scope",
    "a whiteout at one level must not hide the same name elsewhere, nor longer names",
    why=SPEC + ": only the named sibling path",
    seen=["containers/fuse-overlayfs#151"],
)
def wh_scope(c):
    c.simple(
        [f("test", "1"), f("test2", "2"), d("d"), f("d/test", "3"), d("test.d"), f("test.d/test", "4")],
        [wh(".wh.test")],
    )


@case(
    "wh_missing",
    "whiteouts whose target (or whose whole parent) does not exist below",
    why=SPEC + ": nothing to hide; the markers stay hidden",
    seen=["cvmfs/cvmfs#3756"],
)
def wh_missing(c):
    c.image(base(), [wh("etc/.wh.nothere"), d("new"), wh("new/.wh.x"), wh("new/.wh..wh..opq")])
    c.tree("primary", flatten([base(), [d("new")]]))
    c.note(
        "overlayfs shows a 0:0 whiteout device inside a directory that has no lower counterpart"
        " as a name that readdir lists and lstat denies"
    )
    c.exp["trees"][0]["entries"] = [
        dict(o, mtime_ns=None) if o["path"] == "/etc" else o for o in c.exp["trees"][0]["entries"]
    ]


@case(
    "wh_dot_prefix",
    "whiteouts spelled ./etc/.wh.gone and etc/./.wh.sub",
    why="POSIX pathname resolution: '.' components are no-ops",
    seen=["kata-containers/kata-containers#13327"],
)
def wh_dot_prefix(c):
    c.simple(base(), [d("./etc"), wh("./etc/.wh.gone"), wh("etc/./.wh.sub")])


@case(
    "wh_bare",
    "a bare '.wh.' entry must be refused, not delete its directory",
    why="image-spec #1314 (merged): basename after .wh. MUST be non-empty; implementations MUST error",
    seen=["opencontainers/image-spec#1301", "opencontainers/image-spec#1314", "anchore/stereoscope#647"],
)
def wh_bare(c):
    c.image(base(), [d("etc"), wh("etc/.wh."), f("etc/n", "n\n")])
    c.expect("reject")
