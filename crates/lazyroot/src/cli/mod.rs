//! The command line: what was typed becomes calls, errors become messages and exit codes.

pub mod args;
pub mod containers;
pub mod daemon;
pub mod doctor;
pub mod files;
pub mod images;
pub mod mount;
pub mod output;
pub mod progress;
pub mod tar;
pub mod uppers;

use crate::control::client::Client;
use crate::daemon::{lost, recover::Recovered, start};
use crate::dirs::{self, Dirs, Surroundings};
use crate::errors;
use crate::failure::{Failure, Kind};
use args::{Cli, Command, DaemonCommand, DaemonOptions};
use clap::{CommandFactory, Parser};
use output::Out;
use serde_json::json;
use std::process::ExitCode;
use store::Store;

/// What every command needs.
#[derive(Debug)]
pub struct Context {
    /// Where things are.
    pub dirs: Dirs,
    /// Where to print.
    pub out: Out,
}

impl Context {
    /// The store, made when there is none.
    pub fn store(&self) -> anyhow::Result<Store> {
        Ok(Store::open(&self.dirs.root)?)
    }

    /// The daemon, started when there is none.
    pub fn daemon(&self) -> anyhow::Result<Client> {
        self.retry_lost()?;
        start::connect_or_start(&self.dirs, &DaemonOptions::default(), &|r| self.tell(r))
    }

    /// The daemon if it runs.
    pub fn running_daemon(&self) -> anyhow::Result<Option<Client>> {
        self.retry_lost()?;
        start::connect(&self.dirs, &|r| self.tell(r))
    }

    /// Takes away what earlier daemons left, where that has become possible.
    pub fn retry_lost(&self) -> anyhow::Result<()> {
        if let Some(recovered) = lost::retry(&self.dirs)? {
            self.tell(&recovered);
        }
        Ok(())
    }

    /// What happened to a daemon that died.
    pub fn tell(&self, recovered: &Recovered) {
        if self.out.json { eprintln!("{}", recovered.json()) } else { eprintln!("lazyroot: {}", recovered.text()) }
    }
}

/// The whole program.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(e) => {
            // Help and version go to standard output and are no error.
            let code = if e.use_stderr() { Kind::Usage.code() } else { 0 };
            if e.use_stderr() && wants_json(std::env::args_os().skip(1)) {
                eprintln!("{}", json!({"error": usage_message(&e), "code": code}));
            } else {
                let _ = e.print();
            }
            return ExitCode::from(code);
        }
    };
    let json = cli.json;
    match run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) if errors::is_broken_pipe(&e) => ExitCode::from(Kind::Failed.code()),
        Err(e) => {
            let code = errors::kind_of(&e).code();
            let silent = e.downcast_ref::<Failure>().is_some_and(Failure::is_silent);
            if !silent {
                let message = errors::message(&e);
                if json {
                    eprintln!("{}", json!({"error": message, "code": code}));
                } else {
                    eprintln!("lazyroot: {message}");
                }
            }
            ExitCode::from(code)
        }
    }
}

/// Whether `--json` is among the arguments, when they could not be understood.
fn wants_json(args: impl Iterator<Item = std::ffi::OsString>) -> bool {
    args.take_while(|a| a != "--").any(|a| a == "--json")
}

/// What is wrong with the command line, on one line and without the help.
fn usage_message(error: &clap::Error) -> String {
    if error.kind() == clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return "a command or an argument is missing; see `lazyroot help`".to_owned();
    }
    let text = error.to_string();
    let text = text.split("\n\n").next().unwrap_or_default();
    text.trim_start_matches("error: ").split_whitespace().collect::<Vec<_>>().join(" ")
}

fn run(cli: Cli) -> anyhow::Result<()> {
    let out = Out { json: cli.json };
    if let Command::Completions { shell } = cli.command {
        // Rendered first: the generator panics when its writer fails.
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut Cli::command(), "lazyroot", &mut text);
        std::io::Write::write_all(&mut std::io::stdout(), &text)?;
        return Ok(());
    }
    let chosen = dirs::choose(cli.root, cli.state, &Surroundings::of_process())?;
    let context = |dirs: Dirs| Context { dirs, out };
    match cli.command {
        Command::Doctor => doctor::doctor(&Out { json: cli.json }, &chosen),
        Command::Daemon(DaemonCommand::Serve(options)) => daemon::serve_in_background(chosen.prepare()?, &options),
        command => dispatch(&context(chosen.prepare()?), command),
    }
}

fn dispatch(context: &Context, command: Command) -> anyhow::Result<()> {
    match command {
        Command::Import(args) => images::import(context, &args),
        Command::Images => images::list(context),
        Command::Tag { name, new } => images::tag(context, &name, &new),
        Command::Rm(args) => images::rm(context, &args),
        Command::Gc => images::gc(context),
        Command::Inspect { name } => images::inspect(context, &name),
        Command::Fsck { names } => images::fsck(context, &names),
        Command::Ls(args) => files::ls(context, &args),
        Command::Cat { name, paths } => files::cat(context, &name, &paths),
        Command::Find(args) => files::find(context, &args),
        Command::Diff(args) => files::diff(context, &args),
        Command::Export(args) => files::export(context, &args),
        Command::Mount(args) => mount::mount(context, &args),
        Command::Umount { dirs, lazy } => mount::umount(context, &dirs, lazy),
        Command::Run(args) => containers::run(context, args),
        Command::Ps { uppers: true, .. } => uppers::list(context),
        Command::Ps { all, .. } => containers::ps(context, all),
        Command::Stats => daemon::stats(context),
        Command::Logs { lines } => daemon::logs(context, lines),
        Command::Daemon(command) => daemon::command(context, &command),
        Command::Doctor | Command::Completions { .. } => Err(Failure::usage("handled before").into()),
    }
}

#[cfg(test)]
mod tests;
