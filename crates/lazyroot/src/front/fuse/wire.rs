//! The FUSE wire format: bytes to requests, and replies to bytes.
//!
//! Job: parse what the kernel writes, pure and bounds-checked, borrowing names from the buffer; and hold the structs
//! of replies. The kernel and we run on one machine, so the integers are of native order. Field names are the
//! kernel's (`include/uapi/linux/fuse.h`). Failure model: a message that does not parse is a [`WireError`]; with a
//! readable header it can still be answered. It does not know what an operation means.

// The derives for layouts make hidden types that print nothing.
#![allow(missing_debug_implementations)]

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The protocol version that this module speaks.
pub const MAJOR: u32 = 7;
/// The minor version that this module speaks.
pub const MINOR: u32 = 41;
/// The number of the root.
pub const ROOT: u64 = 1;

/// Bits of INIT: the kernel offers, we take.
#[allow(missing_docs)]
pub mod init {
    pub const ASYNC_READ: u64 = 1 << 0;
    pub const EXPORT_SUPPORT: u64 = 1 << 4;
    pub const SPLICE_WRITE: u64 = 1 << 7;
    pub const SPLICE_MOVE: u64 = 1 << 8;
    pub const SPLICE_READ: u64 = 1 << 9;
    pub const AUTO_INVAL_DATA: u64 = 1 << 12;
    pub const DO_READDIRPLUS: u64 = 1 << 13;
    pub const READDIRPLUS_AUTO: u64 = 1 << 14;
    pub const ASYNC_DIO: u64 = 1 << 15;
    pub const NO_OPEN_SUPPORT: u64 = 1 << 17;
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    pub const POSIX_ACL: u64 = 1 << 20;
    pub const ABORT_ERROR: u64 = 1 << 21;
    pub const MAX_PAGES: u64 = 1 << 22;
    pub const CACHE_SYMLINKS: u64 = 1 << 23;
    pub const NO_OPENDIR_SUPPORT: u64 = 1 << 24;
    pub const EXPLICIT_INVAL_DATA: u64 = 1 << 25;
    pub const INIT_EXT: u64 = 1 << 30;
    pub const PASSTHROUGH: u64 = 1 << 37;
    pub const HAS_RESEND: u64 = 1 << 39;
    pub const ALLOW_IDMAP: u64 = 1 << 40;
    pub const OVER_IO_URING: u64 = 1 << 41;
}

/// Bits of the reply to OPEN and OPENDIR.
#[allow(missing_docs)]
pub mod fopen {
    pub const KEEP_CACHE: u32 = 1 << 1;
    pub const CACHE_DIR: u32 = 1 << 3;
}

/// Operation codes.
#[allow(missing_docs)]
pub mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const INIT: u32 = 26;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const ACCESS: u32 = 34;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const BMAP: u32 = 37;
    pub const DESTROY: u32 = 38;
    pub const IOCTL: u32 = 39;
    pub const POLL: u32 = 40;
    pub const NOTIFY_REPLY: u32 = 41;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const READDIRPLUS: u32 = 44;
    pub const RENAME2: u32 = 45;
    pub const LSEEK: u32 = 46;
    pub const COPY_FILE_RANGE: u32 = 47;
    pub const SYNCFS: u32 = 50;
    pub const TMPFILE: u32 = 51;
    pub const STATX: u32 = 52;
    /// One more than the highest code that is counted by itself.
    pub const COUNT: usize = 56;
}

/// Codes of unsolicited messages to the kernel.
#[allow(missing_docs)]
pub mod notify {
    pub const INVAL_INODE: i32 = 2;
    pub const INVAL_ENTRY: i32 = 3;
    pub const STORE: i32 = 4;
}

/// Declares a struct of the wire with the size that the kernel gives it.
macro_rules! wire {
    ($(#[$meta:meta])* $name:ident: $size:literal { $($field:ident: $ty:ty,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
        #[repr(C)]
        #[allow(missing_docs)]
        pub struct $name { $(pub $field: $ty,)* }
        const _: () = assert!(size_of::<$name>() == $size);
    };
}

wire!(/** Head of every request. */ InHeader: 40 {
    len: u32, opcode: u32, unique: u64, nodeid: u64, uid: u32, gid: u32, pid: u32, total_extlen: u16, padding: u16,
});
wire!(/** Head of every reply; `error` is 0, a negative errno, or the code of a notification. */ OutHeader: 16 {
    len: u32, error: i32, unique: u64,
});
wire!(/** What a kernel offers. Kernels before 7.36 send only the first 16 bytes. */ InitIn: 64 {
    major: u32, minor: u32, max_readahead: u32, flags: u32, flags2: u32, unused: [u32; 11],
});
wire!(/** What we take of it. */ InitOut: 64 {
    major: u32, minor: u32, max_readahead: u32, flags: u32, max_background: u16, congestion_threshold: u16,
    max_write: u32, time_gran: u32, max_pages: u16, map_alignment: u16, flags2: u32, unused: [u32; 7],
});
wire!(/** Attributes of an inode. */ WireAttr: 88 {
    ino: u64, size: u64, blocks: u64, atime: u64, mtime: u64, ctime: u64, atimensec: u32, mtimensec: u32,
    ctimensec: u32, mode: u32, nlink: u32, uid: u32, gid: u32, rdev: u32, blksize: u32, flags: u32,
});
wire!(/** Reply to LOOKUP. */ EntryOut: 128 {
    nodeid: u64, generation: u64, entry_valid: u64, attr_valid: u64, entry_valid_nsec: u32, attr_valid_nsec: u32,
    attr: WireAttr,
});
wire!(/** Reply to GETATTR. */ AttrOut: 104 { attr_valid: u64, attr_valid_nsec: u32, dummy: u32, attr: WireAttr, });
wire!(/** OPEN, OPENDIR. */ OpenIn: 8 { flags: u32, open_flags: u32, });
wire!(/** Reply to OPEN and OPENDIR. */ OpenOut: 16 { fh: u64, open_flags: u32, padding: u32, });
wire!(/** READ, READDIR, READDIRPLUS. */ ReadIn: 40 {
    fh: u64, offset: u64, size: u32, read_flags: u32, lock_owner: u64, flags: u32, padding: u32,
});
wire!(/** GETXATTR, LISTXATTR. */ GetxattrIn: 8 { size: u32, padding: u32, });
wire!(/** Reply to GETXATTR and LISTXATTR when a size was asked. */ GetxattrOut: 8 { size: u32, padding: u32, });
wire!(/** LSEEK. */ LseekIn: 24 { fh: u64, offset: u64, whence: u32, padding: u32, });
wire!(/** Reply to LSEEK. */ LseekOut: 8 { offset: u64, });
wire!(/** Reply to STATFS. */ StatfsOut: 80 {
    blocks: u64, bfree: u64, bavail: u64, files: u64, ffree: u64, bsize: u32, namelen: u32, frsize: u32,
    padding: u32, spare: [u32; 6],
});
wire!(/** FORGET. */ ForgetIn: 8 { nlookup: u64, });
wire!(/** One of BATCH_FORGET. */ ForgetOne: 16 { nodeid: u64, nlookup: u64, });
wire!(/** BATCH_FORGET. */ BatchForgetIn: 8 { count: u32, dummy: u32, });
wire!(/** INTERRUPT. */ InterruptIn: 8 { unique: u64, });
wire!(/** Head of a name in READDIR; the name follows, padded to 8 bytes. */ Dirent: 24 {
    ino: u64, off: u64, namelen: u32, kind: u32,
});
wire!(/** Tells the kernel to drop pages or attributes of an inode. */ InvalInodeOut: 24 { ino: u64, off: i64, len: i64, });
wire!(/** Tells the kernel to forget a name, which follows with a NUL. */ InvalEntryOut: 16 {
    parent: u64, namelen: u32, flags: u32,
});
wire!(/** Puts data, which follows, into the page cache. */ StoreOut: 24 {
    nodeid: u64, offset: u64, size: u32, padding: u32,
});
/// Why a message does not parse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Not even a header, or one that contradicts the message's length: it cannot be answered.
    #[error("no header, or one of another length than the message")]
    Header,
    /// The body is shorter than its operation needs, or a name is not terminated: it can be answered.
    #[error("the body does not fit its operation")]
    Body(InHeader),
}

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op<'a> {
    /// Negotiates.
    Init(InitIn),
    /// A name in a directory.
    Lookup {
        /// The name.
        name: &'a [u8],
    },
    /// The kernel gives back references to an inode. No reply.
    Forget {
        /// How many.
        nlookup: u64,
    },
    /// The same for many. No reply.
    BatchForget(&'a [ForgetOne]),
    /// Attributes.
    Getattr,
    /// Target of a symlink.
    Readlink,
    /// Opens a file.
    Open {
        /// As given to open(2).
        flags: u32,
    },
    /// Opens a directory.
    Opendir,
    /// Bytes of a file.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes.
        size: u32,
    },
    /// Names of a directory.
    Readdir {
        /// The cookie to continue at.
        offset: u64,
        /// Bytes of reply wanted at most.
        size: u32,
        /// With attributes.
        plus: bool,
    },
    /// Closes a file or directory.
    Release,
    /// Totals of the file system.
    Statfs,
    /// Value of an extended attribute.
    Getxattr {
        /// Its name.
        name: &'a [u8],
        /// Room for the value, 0 to ask for its size.
        size: u32,
    },
    /// Names of the extended attributes.
    Listxattr {
        /// Room, 0 to ask for the size.
        size: u32,
    },
    /// Finds data or a hole.
    Lseek {
        /// Where to start.
        offset: u64,
        /// What for.
        whence: u32,
    },
    /// A signal hit somebody who waits for a reply.
    Interrupt {
        /// The request that is waited for.
        unique: u64,
    },
    /// The connection ends. Only sent for block device mounts.
    Destroy,
    /// Something that would change the file system.
    Change,
    /// Anything else.
    Other,
}

/// Reads one message.
pub fn parse(message: &[u8]) -> Result<(InHeader, Op<'_>), WireError> {
    let (header, body) = InHeader::read_from_prefix(message).map_err(|_| WireError::Header)?;
    if header.len as usize != message.len() {
        return Err(WireError::Header);
    }
    // Extensions come at the end and are of no use to us.
    let extensions = usize::from(header.total_extlen) * 8;
    let body = body.len().checked_sub(extensions).and_then(|len| body.get(..len)).ok_or(WireError::Body(header))?;
    let op = parse_body(header.opcode, body).ok_or(WireError::Body(header))?;
    Ok((header, op))
}

fn parse_body(code: u32, body: &[u8]) -> Option<Op<'_>> {
    Some(match code {
        opcode::INIT => Op::Init(init_in(body)?),
        opcode::LOOKUP => Op::Lookup { name: name(body)? },
        opcode::FORGET => Op::Forget { nlookup: fixed::<ForgetIn>(body)?.0.nlookup },
        opcode::BATCH_FORGET => {
            let (head, rest) = fixed::<BatchForgetIn>(body)?;
            // The buffer is aligned and the heads before are multiples of 8 bytes long; were it not so, this would be
            // a message that does not parse, not a misread one.
            let (list, _) = <[ForgetOne]>::ref_from_prefix_with_elems(rest, usize::try_from(head.count).ok()?).ok()?;
            Op::BatchForget(list)
        }
        opcode::GETATTR => Op::Getattr,
        opcode::READLINK => Op::Readlink,
        opcode::OPEN => Op::Open { flags: fixed::<OpenIn>(body)?.0.flags },
        opcode::OPENDIR => Op::Opendir,
        opcode::READ => {
            let read = fixed::<ReadIn>(body)?.0;
            Op::Read { offset: read.offset, size: read.size }
        }
        opcode::READDIR | opcode::READDIRPLUS => {
            let read = fixed::<ReadIn>(body)?.0;
            Op::Readdir { offset: read.offset, size: read.size, plus: code == opcode::READDIRPLUS }
        }
        opcode::RELEASE | opcode::RELEASEDIR => Op::Release,
        opcode::STATFS => Op::Statfs,
        opcode::GETXATTR => {
            let (get, rest) = fixed::<GetxattrIn>(body)?;
            Op::Getxattr { name: name(rest)?, size: get.size }
        }
        opcode::LISTXATTR => Op::Listxattr { size: fixed::<GetxattrIn>(body)?.0.size },
        opcode::LSEEK => {
            let seek = fixed::<LseekIn>(body)?.0;
            Op::Lseek { offset: seek.offset, whence: seek.whence }
        }
        opcode::INTERRUPT => Op::Interrupt { unique: fixed::<InterruptIn>(body)?.0.unique },
        opcode::DESTROY => Op::Destroy,
        opcode::SETATTR
        | opcode::SYMLINK
        | opcode::MKNOD
        | opcode::MKDIR
        | opcode::UNLINK
        | opcode::RMDIR
        | opcode::RENAME
        | opcode::RENAME2
        | opcode::LINK
        | opcode::WRITE
        | opcode::SETXATTR
        | opcode::REMOVEXATTR
        | opcode::CREATE
        | opcode::TMPFILE
        | opcode::FALLOCATE
        | opcode::COPY_FILE_RANGE => Op::Change,
        _ => Op::Other,
    })
}

fn fixed<T: FromBytes>(body: &[u8]) -> Option<(T, &[u8])> {
    T::read_from_prefix(body).ok()
}

/// Kernels before 7.36 send a shorter INIT; what they leave out is zero.
fn init_in(body: &[u8]) -> Option<InitIn> {
    if body.len() < 16 {
        return None;
    }
    let mut whole = InitIn::default();
    let len = body.len().min(size_of::<InitIn>());
    whole.as_mut_bytes()[..len].copy_from_slice(&body[..len]);
    Some(whole)
}

/// A NUL-terminated name, without its NUL.
fn name(body: &[u8]) -> Option<&[u8]> {
    let end = body.iter().position(|b| *b == 0)?;
    Some(&body[..end])
}

/// Appends one name of READDIR or, with `entry`, READDIRPLUS to `out`; false (and nothing appended) when it would
/// make `out` longer than `limit`.
pub fn push_dirent(out: &mut Vec<u8>, limit: usize, entry: Option<&EntryOut>, head: Dirent, name: &[u8]) -> bool {
    let head = Dirent { namelen: name.len() as u32, ..head };
    let fixed = size_of::<Dirent>() + if entry.is_some() { size_of::<EntryOut>() } else { 0 };
    let whole = (fixed + name.len()).next_multiple_of(8);
    if out.len() + whole > limit {
        return false;
    }
    let end = out.len() + whole;
    if let Some(entry) = entry {
        out.extend_from_slice(entry.as_bytes());
    }
    out.extend_from_slice(head.as_bytes());
    out.extend_from_slice(name);
    out.resize(end, 0);
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(code: u32, body: &[u8]) -> Vec<u8> {
        let header = InHeader { len: 40 + body.len() as u32, opcode: code, unique: 6, nodeid: 9, ..Default::default() };
        [header.as_bytes(), body].concat()
    }

    /// Parses from an aligned buffer, as a serving thread has it.
    fn parsed(bytes: &[u8]) -> Result<(InHeader, String), WireError> {
        let mut buf = vec![0u64; bytes.len().div_ceil(8)];
        buf.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
        parse(&buf.as_bytes()[..bytes.len()]).map(|(h, op)| (h, format!("{op:?}")))
    }

    #[test]
    fn each_operation() {
        let read = ReadIn { offset: 4096, size: 77, ..Default::default() };
        let batch = [&2u32.to_ne_bytes()[..], &[0; 4], &[1; 16], &[2; 16]].concat();
        let xattr = [GetxattrIn { size: 5, padding: 0 }.as_bytes(), b"user.x\0"].concat();
        for (code, body, want) in [
            (opcode::LOOKUP, b"name\0".to_vec(), "Lookup { name: [110, 97, 109, 101] }".to_owned()),
            (opcode::READ, read.as_bytes().to_vec(), "Read { offset: 4096, size: 77 }".to_owned()),
            (opcode::READDIR, read.as_bytes().to_vec(), "Readdir { offset: 4096, size: 77, plus: false }".to_owned()),
            (
                opcode::READDIRPLUS,
                read.as_bytes().to_vec(),
                "Readdir { offset: 4096, size: 77, plus: true }".to_owned(),
            ),
            (opcode::GETXATTR, xattr, format!("Getxattr {{ name: {:?}, size: 5 }}", b"user.x")),
            (opcode::FORGET, 3u64.to_ne_bytes().to_vec(), "Forget { nlookup: 3 }".to_owned()),
            (opcode::INTERRUPT, 3u64.to_ne_bytes().to_vec(), "Interrupt { unique: 3 }".to_owned()),
            (opcode::WRITE, vec![], "Change".to_owned()),
            (opcode::STATX, vec![], "Other".to_owned()),
            (4711, vec![], "Other".to_owned()),
        ] {
            let (header, op) = parsed(&message(code, &body)).unwrap();
            assert_eq!((header.opcode, op), (code, want));
        }
        let (_, op) = parsed(&message(opcode::BATCH_FORGET, &batch)).unwrap();
        assert_eq!(op.matches("ForgetOne").count(), 2);
    }

    #[test]
    fn short_and_lying_messages() {
        assert_eq!(parse(&[]), Err(WireError::Header));
        assert_eq!(parse(&[0; 39]), Err(WireError::Header));
        let mut long = message(opcode::LOOKUP, b"n\0");
        long.push(0);
        assert_eq!(parse(&long), Err(WireError::Header));
        for (code, body) in [
            (opcode::LOOKUP, &b"unterminated"[..]),
            (opcode::READ, &[0; 39]),
            (opcode::INIT, &[0; 15]),
            (opcode::BATCH_FORGET, &[255; 8]),
            (opcode::GETXATTR, &[0; 8]),
        ] {
            assert!(matches!(parsed(&message(code, body)), Err(WireError::Body(_))), "{code}");
        }
        let mut extended = message(opcode::LOOKUP, b"n\0");
        extended[36..38].copy_from_slice(&9u16.to_ne_bytes());
        assert!(matches!(parse(&extended), Err(WireError::Body(_))));
    }

    #[test]
    fn an_old_kernels_init() {
        let body: Vec<u8> = [7u32, 23, 131072, 0xff].iter().flat_map(|w| w.to_ne_bytes()).collect();
        let bytes = message(opcode::INIT, &body);
        let Ok((_, Op::Init(init))) = parse(&bytes) else { panic!() };
        assert_eq!((init.minor, init.flags, init.flags2), (23, 0xff, 0));
    }

    #[test]
    fn dirents_are_padded_and_limited() {
        let mut out = Vec::new();
        assert!(push_dirent(&mut out, 32, None, Dirent { ino: 1, off: 2, ..Default::default() }, b"abcdefgh"));
        assert_eq!(out.len(), 32);
        assert!(!push_dirent(&mut out, 56, None, Dirent::default(), b"x"));
        assert_eq!(out.len(), 32);
        assert!(push_dirent(&mut out, 192, Some(&EntryOut::default()), Dirent::default(), b"x"));
        assert_eq!(out.len(), 32 + 160);
    }

    proptest! {
        #[test]
        fn any_bytes_parse_or_fail(code in 0u32..60, mut bytes in proptest::collection::vec(any::<u8>(), 0..300), fix in any::<bool>()) {
            if fix && bytes.len() >= 40 {
                let len = bytes.len() as u32;
                bytes[..4].copy_from_slice(&len.to_ne_bytes());
                bytes[4..8].copy_from_slice(&code.to_ne_bytes());
                bytes[36..38].copy_from_slice(&[0, 0]);
            }
            let mut buf = vec![0u64; bytes.len().div_ceil(8)];
            buf.as_mut_bytes()[..bytes.len()].copy_from_slice(&bytes);
            let _ = parse(&buf.as_bytes()[..bytes.len()]);
            let _ = parse(&bytes);
        }
    }
}
