"""Output that appears whole or not at all: a locked temporary sibling of the target folder, flushed, then renamed into place."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil

from .errors import CkptError

_EXCHANGE = 2  # RENAME_EXCHANGE of Linux renameat2
_AT_FDCWD = -100


class Staging:
    """A temporary folder beside `target` that becomes it. Use as a context manager: leaving it without `commit` removes everything.

    overwrite  an existing non-empty target is replaced at commit, and stays as it is until then.
    resume     what an earlier, killed run left in the temporary folder stays there to be taken up; `keep` set before leaving keeps it.
    Errors: E407 target not empty, E408 another ckpt is writing the same target.
    """

    def __init__(self, target: str, *, overwrite: bool = False, resume: bool = False) -> None:
        self.target = os.path.abspath(target)
        self.overwrite, self.resume, self.keep = overwrite, resume, False
        parent, name = os.path.split(self.target)
        self.path = os.path.join(parent, f".{name}.ckpt-partial")
        self.journal = os.path.join(parent, f".{name}.ckpt-journal")
        self._lock_path = os.path.join(parent, f".{name}.ckpt-lock")
        self._lock: int | None = None

    def __enter__(self) -> Staging:
        self._refuse_occupied()
        os.makedirs(os.path.dirname(self.target), exist_ok=True)
        self._lock = self._acquire()
        try:
            self._refuse_occupied()  # a writer that ended just now may have put its result in place
            if not (self.resume and os.path.isdir(self.path) and os.path.isfile(self.journal)):
                self.discard()  # what a killed run left
        except BaseException:
            self._release()
            raise
        return self

    def discard(self) -> None:
        """Make the temporary folder anew and forget what was written."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._forget()
        os.mkdir(self.path)

    def _acquire(self) -> int:
        while True:
            lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise CkptError(
                    "E408",
                    "another ckpt is writing this target right now",
                    where=self.target,
                    hint="wait for it to end, or give another DST",
                ) from None
            with contextlib.suppress(FileNotFoundError):  # a lock file that was removed between open and flock locks nothing
                if os.path.samestat(os.fstat(lock), os.stat(self._lock_path)):
                    return lock
            os.close(lock)

    def _refuse_occupied(self) -> None:
        if not os.path.lexists(self.target):
            return
        if not os.path.isdir(self.target):
            raise CkptError("E407", "the target is a file", where=self.target, hint="give the name of a folder that does not exist yet")
        if os.listdir(self.target) and not self.overwrite:
            raise CkptError(
                "E407",
                "the target folder is not empty",
                where=self.target,
                hint="give another DST, or --overwrite to replace it as a whole",
            )

    def commit(self, *, sync: bool = True) -> None:
        """Make the folder appear under its name. Everything in it must have been flushed already."""
        if sync:
            for folder, _, _ in os.walk(self.path):
                sync_folder(folder)
        old = None
        if os.path.isdir(self.target) and os.listdir(self.target):
            if not self.overwrite:
                raise CkptError("E407", "the target folder was filled by someone else meanwhile", where=self.target)
            if _exchange(self.path, self.target):
                old = self.path
            else:
                old = self.path.removesuffix(".ckpt-partial") + ".ckpt-old"
                os.rename(self.target, old)
                os.rename(self.path, self.target)
        else:
            try:
                os.rename(self.path, self.target)
            except OSError as error:
                raise CkptError("E407", "the target could not be put in place", where=self.target, found=str(error)) from None
        if sync:
            sync_folder(os.path.dirname(self.target))
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)
        self._forget()
        self._release()

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            if not self.keep:
                shutil.rmtree(self.path, ignore_errors=True)
                self._forget()
            self._release()

    def _forget(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.journal)

    def _release(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._lock_path)
            os.close(self._lock)
            self._lock = None


def sync_folder(path: str) -> None:
    """Flush a folder's entries to disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError:  # some network filesystems refuse to sync a folder
        pass
    finally:
        os.close(fd)


def _exchange(a: str, b: str) -> bool:
    """Swap two folders atomically; False where the system cannot."""
    try:
        function = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    return bool(function(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _EXCHANGE) == 0)


def overlaps(source: str, target: str) -> bool:
    """Whether one path is the other or lies inside it (links resolved)."""
    a, b = os.path.realpath(source), os.path.realpath(target)
    return a == b or a.startswith(b + os.sep) or b.startswith(a + os.sep)
