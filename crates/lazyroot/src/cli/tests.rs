use super::args::*;
use crate::control::proto::Shape;
use clap::{CommandFactory, Parser};

fn parse(line: &str) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(std::iter::once("lazyroot").chain(line.split_whitespace()))
}

#[test]
fn the_definition_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn command_lines_parse() {
    type Check = fn(&Command) -> bool;
    let table: &[(&str, Check)] = &[
        ("import dir:/usr usr", |c| matches!(c, Command::Import(i) if i.name == "usr" && i.source == "dir:/usr")),
        (
            "import dir:/ r --exclude a --exclude b --include c",
            |c| matches!(c, Command::Import(i) if i.exclude == ["a", "b"] && i.include == ["c"]),
        ),
        ("images --json", |c| matches!(c, Command::Images)),
        ("mount a /mnt", |c| matches!(c, Command::Mount(m) if m.shape.is_none() && !m.rw && !m.suid)),
        ("mount a /mnt --as tree --rw", |c| matches!(c, Command::Mount(m) if m.shape == Some(Shape::Tree) && m.rw)),
        ("umount /a /b --lazy", |c| matches!(c, Command::Umount { dirs, lazy: true } if dirs.len() == 2)),
        ("run a -- sh -c -x", |c| matches!(c, Command::Run(r) if r.command == ["sh", "-c", "-x"])),
        ("run --rm -it -u root:www -w /x -e A=1 -e B -v /a:/b:ro --entrypoint e --network host a -- c", |c| {
            matches!(c, Command::Run(r) if r.rm && r.interactive && r.tty && r.user.as_deref() == Some("root:www")
                && r.workdir.as_deref() == Some("/x") && r.env == ["A=1", "B"] && r.volume.len() == 1
                && r.volume[0].read_only && r.entrypoint.as_deref() == Some("e") && r.network == Network::Host)
        }),
        ("run a --timing", |c| matches!(c, Command::Run(r) if r.timeline && r.network == Network::None)),
        ("find a / --name *.so --type f", |c| matches!(c, Command::Find(f) if f.kind == Some(FileType::File))),
        ("ls a", |c| matches!(c, Command::Ls(l) if l.path.as_os_str() == "/")),
        ("export a --as erofs --metadata-only f", |c| matches!(c, Command::Export(e) if e.metadata_only)),
        ("daemon stop --force", |c| matches!(c, Command::Daemon(DaemonCommand::Stop { force: true }))),
        ("daemon run --idle 0", |c| matches!(c, Command::Daemon(DaemonCommand::Run(o)) if o.idle == 0)),
        (
            "daemon start",
            |c| matches!(c, Command::Daemon(DaemonCommand::Start(o)) if o.idle == crate::daemon::IDLE_DEFAULT),
        ),
        ("fsck", |c| matches!(c, Command::Fsck { names } if names.is_empty())),
        ("logs -n 5", |c| matches!(c, Command::Logs { lines: Some(5) })),
        ("completions bash", |c| matches!(c, Command::Completions { .. })),
    ];
    for (line, check) in table {
        let cli = parse(line).unwrap_or_else(|e| panic!("{line}: {e}"));
        assert!(check(&cli.command), "{line}: {:?}", cli.command);
    }
}

#[test]
fn global_options_go_anywhere() {
    for line in ["--root /r --state /s --json images", "images --root /r --state /s --json"] {
        let cli = parse(line).unwrap();
        assert_eq!(cli.root.as_deref(), Some(std::path::Path::new("/r")));
        assert_eq!(cli.state.as_deref(), Some(std::path::Path::new("/s")));
        assert!(cli.json);
    }
}

#[test]
fn nonsense_is_refused() {
    for line in [
        "",
        "fly",
        "mount a",
        "mount a /m --as loop",
        "mount a /m --upper x",
        "umount",
        "run",
        "run a sh",
        "run a -v /x -- c",
        "run a -v /a:b -- c",
        "run a --network bridge -- c",
        "rm",
        "export a f",
        "daemon",
        "daemon run --threads 0",
        "cat a",
    ] {
        assert!(parse(line).is_err(), "{line}");
    }
}

#[test]
fn help_keeps_a_commands_own_options_apart_from_global_ones() {
    fn check(command: &mut clap::Command, count: &mut usize) {
        let help = command.render_long_help().to_string();
        let (own, global) = help.split_once("Global options:").unwrap_or_else(|| panic!("{help}"));
        for option in ["--root <DIR>", "--state <DIR>", "--json"] {
            assert!(!own.contains(option) && global.contains(option), "{help}");
        }
        *count += 1;
        for below in command.get_subcommands_mut().filter(|c| c.get_name() != "help") {
            check(below, count);
        }
    }
    let mut command = Cli::command();
    command.build();
    let mut count = 0;
    check(&mut command, &mut count);
    assert!(count > 25, "{count}");
    let mut mount = command.find_subcommand("mount").unwrap().clone();
    let help = mount.render_help().to_string();
    assert!(help.find("--rw").unwrap() < help.find("Global options:").unwrap(), "{help}");
}
