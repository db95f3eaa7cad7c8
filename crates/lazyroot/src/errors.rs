//! From any error to its kind, in one place.

use crate::failure::{Failure, Kind};
use crate::front::Fault;
use image::erofs::{ExportError, PlanError};
use image::index::IndexError;
use import::ImportError;
use std::error::Error;
use std::io;
use store::{FetchError, FrameError, ReadError, StoreError};

/// The kind of the first error in the chain that says something about it.
pub fn kind_of(error: &anyhow::Error) -> Kind {
    error.chain().find_map(kind_of_one).unwrap_or(Kind::Failed)
}

fn kind_of_one(e: &(dyn Error + 'static)) -> Option<Kind> {
    if let Some(e) = e.downcast_ref::<Failure>() {
        return Some(e.kind());
    }
    if let Some(e) = e.downcast_ref::<StoreError>() {
        return of_store(e);
    }
    if let Some(e) = e.downcast_ref::<ImportError>() {
        return match e {
            ImportError::Usage { .. } => Some(Kind::Usage),
            ImportError::NotFound { .. } => Some(Kind::NotFound),
            ImportError::Corrupt { .. } | ImportError::Mismatch { .. } => Some(Kind::Corrupt),
            ImportError::Changing { .. } => Some(Kind::Busy),
            ImportError::Store(e) => of_store(e),
            ImportError::Io { source, .. } => of_io(source),
            _ => None,
        };
    }
    if let Some(e) = e.downcast_ref::<IndexError>() {
        return matches!(e, IndexError::Format(_)).then_some(Kind::Corrupt);
    }
    if e.is::<format::FormatError>() || e.is::<FrameError>() {
        return Some(Kind::Corrupt);
    }
    if let Some(e) = e.downcast_ref::<PlanError>() {
        return matches!(e, PlanError::Corrupt { .. }).then_some(Kind::Corrupt);
    }
    if let Some(ExportError::Plan(PlanError::Corrupt { .. })) = e.downcast_ref::<ExportError>() {
        return Some(Kind::Corrupt);
    }
    if let Some(e) = e.downcast_ref::<FetchError>() {
        return match e {
            FetchError::Corrupt { .. } => Some(Kind::Corrupt),
            FetchError::NotFound { .. } => Some(Kind::NotFound),
            FetchError::TimedOut | FetchError::Overloaded | FetchError::Unavailable { .. } => Some(Kind::Unavailable),
            _ => None,
        };
    }
    if matches!(e.downcast_ref::<ReadError>(), Some(ReadError::Corrupt { .. })) {
        return Some(Kind::Corrupt);
    }
    match e.downcast_ref::<Fault>() {
        Some(Fault::Damaged(_)) => return Some(Kind::Corrupt),
        // It says what this user may not.
        Some(Fault::Io { what: "fusermount3", .. }) => return Some(Kind::Unavailable),
        _ => {}
    }
    e.downcast_ref::<io::Error>().and_then(of_io)
}

fn of_store(e: &StoreError) -> Option<Kind> {
    match e {
        StoreError::BadName { .. } | StoreError::Usage(_) => Some(Kind::Usage),
        StoreError::NoImage { .. } => Some(Kind::NotFound),
        StoreError::Missing { .. } | StoreError::Format { .. } | StoreError::Corrupt { .. } => Some(Kind::Corrupt),
        StoreError::Version { .. } => Some(Kind::Unavailable),
        StoreError::Busy { .. } => Some(Kind::Busy),
        StoreError::Io { source, .. } => of_io(source),
        _ => Some(Kind::Failed),
    }
}

fn of_io(e: &io::Error) -> Option<Kind> {
    match e.kind() {
        io::ErrorKind::NotFound => Some(Kind::NotFound),
        io::ErrorKind::PermissionDenied => Some(Kind::Unavailable),
        io::ErrorKind::ResourceBusy => Some(Kind::Busy),
        _ => None,
    }
}

/// An error and its causes on one line, each said once: many messages name their cause themselves.
pub fn message(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let part = cause.to_string();
        if text.is_empty() {
            text = part;
        } else if !text.contains(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
    }
    text
}

/// Whether the reader of our standard output went away: nothing to complain about.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|e| e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe))
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn every_error_has_one_code() {
        let io = |kind| io::Error::from(kind);
        let no_image = || StoreError::NoImage { name: "x".into() };
        let table: Vec<(anyhow::Error, u8)> = vec![
            (anyhow::anyhow!("something"), 1),
            (Failure::usage("x").into(), 2),
            (StoreError::BadName { name: "x".into(), why: "y" }.into(), 2),
            (no_image().into(), 3),
            (anyhow::Error::from(no_image()).context("outer"), 3),
            (ImportError::Store(no_image()).into(), 3),
            (Failure::busy("x").into(), 4),
            (StoreError::Busy { path: "p".into(), who: "w" }.into(), 4),
            (StoreError::Corrupt { path: "p".into(), why: "w".into() }.into(), 5),
            (ReadError::Corrupt { what: "a", at: 0, why: "b" }.into(), 5),
            (Failure::unavailable("x").into(), 6),
            (StoreError::Version { path: "p".into(), version: "9".into(), known: 1 }.into(), 6),
            (io(io::ErrorKind::NotFound).into(), 3),
            (io(io::ErrorKind::Other).into(), 1),
            (Fault::Io { what: "fusermount3", source: io(io::ErrorKind::Other) }.into(), 6),
            (Fault::Io { what: "mounting", source: io(io::ErrorKind::Other) }.into(), 1),
            (Failure::status(42, "").into(), 42),
        ];
        for (error, code) in table {
            assert_eq!(kind_of(&error).code(), code, "{error:#}");
        }
    }

    #[test]
    fn causes_are_said_once() {
        let inner: Result<(), io::Error> = Err(io::Error::other("disk on fire"));
        let error = inner.context("cannot write: disk on fire").context("saving").unwrap_err();
        assert_eq!(message(&error), "saving: cannot write: disk on fire");
    }
}
