//! The command line as data: one definition yields the parser, the help and the completions.

#![allow(rustdoc::broken_intra_doc_links)] // Help is for people: brackets mean what may be left out.

use crate::control::proto::Shape;
use crate::run::runtime::Name as RuntimeName;
use crate::run::volume::Volume;
use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use std::path::PathBuf;

/// Where help has the options of every command.
const GLOBAL: &str = "Global options";

/// Root filesystems that are there at once and load as they are read.
#[derive(Debug, Parser)]
#[command(
    name = "lazyroot",
    version,
    max_term_width = 100,
    after_help = "Exit codes: 0 done, 1 failed, 2 usage, 3 not found, 4 busy, 5 corrupt, 6 unavailable here; `run` passes the\ncommand's own status on (125 to 127: it did not start)."
)]
pub struct Cli {
    /// Directory of the store and the cache [default: /var/lib/lazyroot, for ordinary users
    /// ~/.local/share/lazyroot; env: LAZYROOT_ROOT]
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub root: Option<PathBuf>,
    /// Directory of the daemon's socket, leases and log [default: below /run; env: LAZYROOT_STATE]
    #[arg(long, global = true, help_heading = GLOBAL, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub state: Option<PathBuf>,
    /// Print JSON, one object a line
    #[arg(long, global = true, help_heading = GLOBAL)]
    pub json: bool,
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make an image from a directory, a tar archive, an OCI layout or a docker archive
    Import(Import),
    /// List images
    Images,
    /// Give an image another name
    Tag {
        /// The image
        name: String,
        /// Its new name
        new: String,
    },
    /// Remove images, containers or upper directories
    Rm(Rm),
    /// Remove objects that no image uses
    Gc,
    /// Show an image's configuration, digests and counts
    Inspect {
        /// The image
        name: String,
    },
    /// List a directory of an image
    Ls(Ls),
    /// Print files of an image
    Cat {
        /// The image
        name: String,
        /// Absolute paths in it
        #[arg(required = true)]
        paths: Vec<PathBuf>,
    },
    /// List all names below a directory of an image
    Find(Find),
    /// Show what differs between two images, or an image and a directory
    Diff(Diff),
    /// Write an image as one file
    Export(Export),
    /// Mount an image at a directory
    Mount(Mount),
    /// Unmount
    Umount {
        /// Mount points
        #[arg(required = true, value_hint = ValueHint::DirPath)]
        dirs: Vec<PathBuf>,
        /// Detach it now, even when it is in use
        #[arg(long)]
        lazy: bool,
    },
    /// Run a command in a container whose root is an image
    Run(Run),
    /// List mounts (and, with -a, containers)
    Ps {
        /// Containers too, also those that ended
        #[arg(short, long)]
        all: bool,
        /// Instead: what was written on `mount --rw` and in containers, and is kept
        #[arg(long, conflicts_with = "all")]
        uppers: bool,
    },
    /// Show the daemon's counters
    Stats,
    /// Print the daemon's log
    Logs {
        /// Only the last lines
        #[arg(short = 'n', long, value_name = "COUNT")]
        lines: Option<usize>,
    },
    /// Check images, objects and the cache against their digests
    Fsck {
        /// Images; all without
        names: Vec<String>,
    },
    /// Say what this machine has and what follows from it
    Doctor,
    /// Start, stop or look at the daemon
    #[command(subcommand)]
    Daemon(DaemonCommand),
    /// Print shell completions
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// `import`
#[derive(Debug, Args)]
pub struct Import {
    /// dir:PATH, tar:FILE, tar:- (standard input), oci:DIR[:TAG] or docker-archive:FILE[:TAG]
    pub source: std::ffi::OsString,
    /// NAME[:TAG]
    pub name: String,
    /// dir: only: take only what matches this glob (may be repeated)
    #[arg(long, value_name = "GLOB")]
    pub include: Vec<String>,
    /// dir: only: leave out what matches this glob (may be repeated)
    #[arg(long, value_name = "GLOB")]
    pub exclude: Vec<String>,
    /// dir: only: leave out what may not be read, instead of failing
    #[arg(long)]
    pub skip_unreadable: bool,
    /// Which image of a manifest list [default: this machine's]
    #[arg(long, value_name = "OS/ARCH[/VARIANT]")]
    pub platform: Option<String>,
    /// Threads that decode, hash and compress [default: one per processor]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub threads: Option<u16>,
    /// Names that the image may have; every million beyond the default takes up to 120 MB of memory more
    #[arg(long, value_name = "COUNT", default_value_t = 2_000_000, value_parser = clap::value_parser!(u32).range(1..=4_194_303))]
    pub max_names: u32,
    /// Print nothing
    #[arg(short, long)]
    pub quiet: bool,
}

/// `rm`
#[derive(Debug, Args)]
pub struct Rm {
    /// Images, or containers by identifier or name
    #[arg(required = true)]
    pub names: Vec<String>,
    /// Stop a container that still runs
    #[arg(short, long)]
    pub force: bool,
    /// The names are containers
    #[arg(long)]
    pub container: bool,
    /// The names are upper directories of `mount --rw`, which `ps --uppers` lists
    #[arg(long, conflicts_with_all = ["container", "force"])]
    pub upper: bool,
}

/// `ls`
#[derive(Debug, Args)]
pub struct Ls {
    /// The image
    pub name: String,
    /// Absolute path in it
    #[arg(default_value = "/")]
    pub path: PathBuf,
    /// Mode, links, owner, size and time too
    #[arg(short)]
    pub long: bool,
}

/// Types that `find` tells apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FileType {
    /// Regular file
    #[value(name = "f")]
    File,
    /// Directory
    #[value(name = "d")]
    Dir,
    /// Symbolic link
    #[value(name = "l")]
    Link,
    /// Block device
    #[value(name = "b")]
    Block,
    /// Character device
    #[value(name = "c")]
    Char,
    /// FIFO
    #[value(name = "p")]
    Fifo,
    /// Socket
    #[value(name = "s")]
    Socket,
}

/// `find`
#[derive(Debug, Args)]
pub struct Find {
    /// The image
    pub name: String,
    /// Absolute path in it
    #[arg(default_value = "/")]
    pub path: PathBuf,
    /// Only names that match this glob (* ? [..])
    #[arg(long = "name", value_name = "GLOB")]
    pub pattern: Option<String>,
    /// Only this type
    #[arg(long = "type", value_name = "TYPE")]
    pub kind: Option<FileType>,
}

/// `diff`
#[derive(Debug, Args)]
pub struct Diff {
    /// An image
    pub a: String,
    /// An image, or a directory (dir:PATH, or what begins with `/` or `.`)
    pub b: String,
    /// At most so many lines
    #[arg(long, value_name = "COUNT", default_value_t = 1000)]
    pub limit: usize,
    /// Do not compare modification times
    #[arg(long)]
    pub ignore_times: bool,
}

/// What `export` writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ExportFormat {
    /// An EROFS image
    Erofs,
    /// A tar archive
    Tar,
}

/// `export`
#[derive(Debug, Args)]
pub struct Export {
    /// The image
    pub name: String,
    /// The file to write; must not exist. `-` for standard output (tar only)
    #[arg(value_hint = ValueHint::FilePath)]
    pub file: PathBuf,
    /// What to write
    #[arg(long = "as", value_name = "FORMAT")]
    pub format: ExportFormat,
    /// erofs only: the metadata without the data
    #[arg(long)]
    pub metadata_only: bool,
    /// tar only: leave holes out, as `tar --sparse` does (not every program reads that)
    #[arg(short = 'S', long)]
    pub sparse: bool,
}

/// `mount`
#[derive(Debug, Args)]
pub struct Mount {
    /// The image
    pub name: String,
    /// An empty directory is the usual mount point; symbolic links are not followed
    #[arg(value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// How; without it the fastest that works here
    #[arg(long = "as", value_name = "SHAPE")]
    pub shape: Option<Shape>,
    /// Writable: an overlay whose upper directory is kept
    #[arg(long)]
    pub rw: bool,
    /// Honour set-user-ID bits
    #[arg(long)]
    pub suid: bool,
    /// Honour device nodes
    #[arg(long)]
    pub dev: bool,
    /// Take up the upper directory of an earlier `mount --rw` of the same image
    #[arg(long, value_name = "ID", requires = "rw")]
    pub upper: Option<String>,
}

/// Which network a container sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Network {
    /// Loopback only
    None,
    /// The host's
    Host,
}

/// Where a container's changes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum UpperKind {
    /// Below the root directory
    Disk,
    /// A tmpfs, gone with the container
    Memory,
}

/// `run`
#[derive(Debug, Args)]
pub struct Run {
    /// The image
    pub name: String,
    /// The container runtime; without it the first of crun and runc that works here
    #[arg(long)]
    pub runtime: Option<RuntimeName>,
    /// Remove the container when it ends
    #[arg(long)]
    pub rm: bool,
    /// Keep standard input open
    #[arg(short, long)]
    pub interactive: bool,
    /// Give it a terminal
    #[arg(short, long)]
    pub tty: bool,
    /// User, by name or number, of the image
    #[arg(short, long, value_name = "USER[:GROUP]")]
    pub user: Option<String>,
    /// Working directory
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// Environment; KEY alone takes the caller's value
    #[arg(short, long, value_name = "KEY[=VALUE]")]
    pub env: Vec<String>,
    /// Bind a host directory or file
    #[arg(short, long, value_name = "SRC:DST[:ro]")]
    pub volume: Vec<Volume>,
    /// Run this instead of the image's entry point ("" for none)
    #[arg(long, value_name = "COMMAND")]
    pub entrypoint: Option<String>,
    /// The network
    #[arg(long, default_value = "none")]
    pub network: Network,
    /// The container's name
    #[arg(long = "name", value_name = "NAME")]
    pub container: Option<String>,
    /// Host name [default: the container's identifier]
    #[arg(long, value_name = "NAME")]
    pub hostname: Option<String>,
    /// A capability besides runc's own default ones (may be repeated)
    #[arg(long, value_name = "CAPABILITY")]
    pub cap_add: Vec<String>,
    /// Where changes go
    #[arg(long, value_name = "WHERE", default_value = "disk")]
    pub upper: UpperKind,
    /// How the image is mounted below
    #[arg(long = "as", value_name = "SHAPE")]
    pub shape: Option<Shape>,
    /// Print what took how long, and how much of the image was loaded (also: --timing)
    #[arg(long, alias = "timing")]
    pub timeline: bool,
    /// Command and arguments
    #[arg(last = true)]
    pub command: Vec<String>,
}

/// `daemon`
#[derive(Debug, Subcommand)]
pub enum DaemonCommand {
    /// Start it, if it does not run
    Start(DaemonOptions),
    /// End it when nothing is mounted any more
    Stop {
        /// Unmount everything and end now
        #[arg(long)]
        force: bool,
    },
    /// Say whether it runs
    Status,
    /// Serve in the foreground (for systemd)
    Run(DaemonOptions),
    /// Evict images' content from the cache
    DropCaches {
        /// The image; all without
        name: Option<String>,
    },
    /// Serve in the background: what `start` and others run
    #[command(hide = true)]
    Serve(DaemonOptions),
}

/// How the daemon behaves.
#[derive(Debug, Clone, Args)]
pub struct DaemonOptions {
    /// Seconds without mounts after which it ends; 0 never
    #[arg(long, value_name = "SECONDS", default_value_t = crate::daemon::IDLE_DEFAULT)]
    pub idle: u64,
    /// Threads that serve reads, per session
    #[arg(long, value_name = "COUNT", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub threads: u16,
    /// MiB of an image's metadata that are put into the page cache of a mounted EROFS before it asks; 0 none
    #[arg(long, value_name = "MIB", default_value_t = crate::daemon::PUSH_DEFAULT)]
    pub push_metadata: u32,
}
