//! Pure choices: what of the kernel's offer is taken, how attributes look on the wire, where a read is cut.
//!
//! No I/O, no state. Nothing on either side ever changes, so validity times are as long as the kernel counts.

use super::wire::{AttrOut, EntryOut, InitIn, InitOut, MAJOR, MINOR, WireAttr, init};
use crate::front::{Attr, Fault};

/// How long names and attributes hold, in seconds: 136 years.
pub const FOREVER: u64 = u32::MAX as u64;
/// The most bytes of one READ that are negotiated: 256 pages.
pub const MAX_READ: usize = 1 << 20;
/// Oldest minor version that is served: LSEEK, parallel directory operations and `max_pages` are newer than some
/// kernels that people run, but none of those kernels mounts a detached tree.
pub const OLDEST_MINOR: u32 = 28;
/// Reads that wait for a fetch count as in flight, and the kernel stops sending readahead at this many.
pub const MAX_BACKGROUND: u16 = u16::MAX;

/// When the kernel asks for names with their attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Readdirplus {
    /// Never.
    Never,
    /// At a directory's start and when its names are then looked up.
    #[default]
    Auto,
    /// Always.
    Always,
}

/// What a session wants, if the kernel has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wish {
    /// Names with attributes.
    pub readdirplus: Readdirplus,
    /// The kernel checks ACLs (and asks for them).
    pub posix_acl: bool,
    /// The mount may be shown through an id mapping.
    pub idmap: bool,
    /// Opening needs no request.
    pub no_open: bool,
    /// Names other than the root's may come and go, so symlink targets and the like are all that is for ever.
    pub export: bool,
}

/// Answers INIT. Fails when the kernel's protocol is too old or of another major version.
pub fn negotiate(offer: &InitIn, wish: &Wish) -> Result<InitOut, Fault> {
    if offer.major != MAJOR || offer.minor < OLDEST_MINOR {
        return Err(Fault::Invalid("the kernel's FUSE protocol is older than 7.28"));
    }
    let offered = u64::from(offer.flags)
        | if u64::from(offer.flags) & init::INIT_EXT != 0 { u64::from(offer.flags2) << 32 } else { 0 };
    // Not ASYNC_DIO: a reader of O_DIRECT would wait without ears for signals, and could not be killed while its
    // bytes are fetched. Explicit cache control and never AUTO_INVAL_DATA: nothing changes, and pushed pages must stay. HAS_RESEND lets
    // a successor that takes the descriptors over have unanswered requests sent again.
    let mut take = init::ASYNC_READ
        | init::SPLICE_WRITE
        | init::SPLICE_MOVE
        | init::SPLICE_READ
        | init::PARALLEL_DIROPS
        | init::ABORT_ERROR
        | init::MAX_PAGES
        | init::CACHE_SYMLINKS
        | init::EXPLICIT_INVAL_DATA
        | init::INIT_EXT
        | init::HAS_RESEND;
    match wish.readdirplus {
        Readdirplus::Never => {}
        Readdirplus::Auto => take |= init::DO_READDIRPLUS | init::READDIRPLUS_AUTO,
        Readdirplus::Always => take |= init::DO_READDIRPLUS,
    }
    for (wanted, flags) in [
        (wish.posix_acl, init::POSIX_ACL),
        (wish.idmap, init::ALLOW_IDMAP),
        (wish.no_open, init::NO_OPEN_SUPPORT | init::NO_OPENDIR_SUPPORT),
        (wish.export, init::EXPORT_SUPPORT),
    ] {
        if wanted {
            take |= flags;
        }
    }
    let taken = take & offered;
    Ok(InitOut {
        major: MAJOR,
        minor: MINOR.min(offer.minor),
        max_readahead: offer.max_readahead,
        flags: taken as u32,
        flags2: (taken >> 32) as u32,
        max_background: MAX_BACKGROUND,
        congestion_threshold: MAX_BACKGROUND,
        // Nothing is written; the smallest keeps the request buffer small.
        max_write: 4096,
        time_gran: 1,
        max_pages: if taken & init::MAX_PAGES != 0 { (MAX_READ / 4096) as u16 } else { 0 },
        ..Default::default()
    })
}

/// The taken flags of an answer to INIT, all 64.
pub fn taken(out: &InitOut) -> u64 {
    u64::from(out.flags) | (u64::from(out.flags2) << 32)
}

/// How many bytes of a read of `size` at `offset` lie inside a file of `file_size` bytes: what must be answered, no
/// byte less.
pub fn clip(offset: u64, size: u32, file_size: u64) -> usize {
    let inside = file_size.saturating_sub(offset).min(u64::from(size));
    usize::try_from(inside).expect("at most u32::MAX")
}

/// Attributes on the wire. `st_ino` is `ino`.
pub fn wire_attr(ino: u64, attr: &Attr) -> WireAttr {
    // The kernel keeps seconds as signed and takes ours as they are.
    let seconds = attr.mtime_sec.cast_unsigned();
    let (major, minor) = attr.rdev;
    WireAttr {
        ino,
        size: attr.size,
        blocks: attr.blocks,
        atime: seconds,
        mtime: seconds,
        ctime: seconds,
        atimensec: attr.mtime_nsec,
        mtimensec: attr.mtime_nsec,
        ctimensec: attr.mtime_nsec,
        mode: attr.mode,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: (minor & 0xff) | ((major & 0xfff) << 8) | ((minor & 0xf_ff00) << 12),
        blksize: 4096,
        flags: 0,
    }
}

/// The answer to GETATTR.
pub fn attr_out(ino: u64, attr: &Attr) -> AttrOut {
    AttrOut { attr_valid: FOREVER, attr: wire_attr(ino, attr), ..Default::default() }
}

/// The answer to LOOKUP.
pub fn entry_out(nodeid: u64, attr: &Attr) -> EntryOut {
    EntryOut { nodeid, entry_valid: FOREVER, attr_valid: FOREVER, attr: wire_attr(nodeid, attr), ..Default::default() }
}

/// The answer to LOOKUP of a name that is not there and never will be.
pub fn no_entry() -> EntryOut {
    EntryOut { entry_valid: FOREVER, ..Default::default() }
}

/// The place where a READDIR with a cookie goes on. The cookies: 0 the start, 1 after `.`, 2 after `..`, then one
/// more than that per name; so they are stable, and a directory can be entered anywhere.
pub fn ordinal_of(cookie: u64) -> Option<u32> {
    u32::try_from(cookie.checked_sub(2)?).ok()
}

/// The cookie that goes on behind the name with this ordinal.
pub fn cookie_after(ordinal: u32) -> u64 {
    u64::from(ordinal) + 3
}

/// How GETXATTR and LISTXATTR are answered.
#[derive(Debug, PartialEq, Eq)]
pub enum XattrReply {
    /// Only the size was asked.
    Size(u32),
    /// The value itself.
    Value,
}

/// Decides how a value of `len` bytes is answered to a consumer with room for `room` (0: it asks for the size).
pub fn xattr_reply(len: usize, room: u32) -> Result<XattrReply, Fault> {
    let len = u32::try_from(len).map_err(|_| Fault::Range)?;
    match room {
        0 => Ok(XattrReply::Size(len)),
        room if room < len => Err(Fault::Range),
        _ => Ok(XattrReply::Value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn wish() -> Wish {
        Wish { readdirplus: Readdirplus::Auto, posix_acl: false, idmap: true, no_open: true, export: true }
    }

    #[test]
    fn only_what_is_offered_is_taken() {
        let none = InitIn { major: 7, minor: 31, max_readahead: 9, ..Default::default() };
        let out = negotiate(&none, &wish()).unwrap();
        assert_eq!((taken(&out), out.minor, out.max_pages), (0, 31, 0));
        let all = InitIn { flags: u32::MAX, flags2: u32::MAX, minor: 99, ..none };
        let out = negotiate(&all, &wish()).unwrap();
        let flags = taken(&out);
        assert_eq!((out.minor, out.max_pages), (MINOR, 256));
        for never in [init::AUTO_INVAL_DATA, init::ASYNC_DIO, init::PASSTHROUGH, init::OVER_IO_URING, init::POSIX_ACL] {
            assert_eq!(flags & never, 0, "{never:#x}");
        }
        for always in [init::HAS_RESEND, init::PARALLEL_DIROPS, init::EXPLICIT_INVAL_DATA, init::NO_OPEN_SUPPORT] {
            assert_ne!(flags & always, 0, "{always:#x}");
        }
        // Without INIT_EXT the second word means nothing.
        let old = InitIn { flags: !(init::INIT_EXT as u32), ..all };
        assert_eq!(taken(&negotiate(&old, &wish()).unwrap()) >> 32, 0);
    }

    #[test]
    fn other_versions_are_refused() {
        assert!(negotiate(&InitIn { major: 8, minor: 40, ..Default::default() }, &wish()).is_err());
        assert!(negotiate(&InitIn { major: 7, minor: 27, ..Default::default() }, &wish()).is_err());
    }

    #[test]
    fn readdirplus_modes() {
        let all = InitIn { major: 7, minor: 40, flags: u32::MAX, ..Default::default() };
        for (mode, want) in [
            (Readdirplus::Never, 0),
            (Readdirplus::Auto, init::DO_READDIRPLUS | init::READDIRPLUS_AUTO),
            (Readdirplus::Always, init::DO_READDIRPLUS),
        ] {
            let out = negotiate(&all, &Wish { readdirplus: mode, ..wish() }).unwrap();
            assert_eq!(taken(&out) & (init::DO_READDIRPLUS | init::READDIRPLUS_AUTO), want);
        }
    }

    #[test]
    fn attributes() {
        let attr = Attr { mtime_sec: -1, mtime_nsec: 5, rdev: (0xabc, 0x12345), mode: 0o20600, ..Default::default() };
        let wire = wire_attr(7, &attr);
        assert_eq!((wire.ino, wire.mtime as i64, wire.ctimensec), (7, -1, 5));
        assert_eq!(wire.rdev, rustix::fs::makedev(0xabc, 0x12345) as u32);
        assert_eq!(no_entry().nodeid, 0);
    }

    #[test]
    fn xattr_answers() {
        assert_eq!(xattr_reply(5, 0).unwrap(), XattrReply::Size(5));
        assert_eq!(xattr_reply(5, 5).unwrap(), XattrReply::Value);
        assert!(matches!(xattr_reply(5, 4), Err(Fault::Range)));
        assert_eq!(xattr_reply(0, 0).unwrap(), XattrReply::Size(0));
    }

    proptest! {
        #[test]
        fn a_read_is_cut_only_at_the_end(offset: u64, size: u32, file: u64) {
            let n = clip(offset, size, file) as u64;
            prop_assert!(n <= u64::from(size));
            if n < u64::from(size) && offset <= file {
                prop_assert_eq!(offset + n, file);
            }
            prop_assert!(offset < file || n == 0);
        }

        #[test]
        fn cookies_go_on_where_they_stopped(ordinal in 0u32..u32::MAX) {
            prop_assert_eq!(ordinal_of(cookie_after(ordinal)), Some(ordinal + 1));
        }
    }
}
