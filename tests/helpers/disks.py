"""A disk whose process is killed at an operation on files, and which may then lose its power."""

import contextlib
import os
import pathlib

from jaxcomp_files.versions import Versions

OPERATIONS = ("mkdir", "open", "fsync", "replace", "unlink", "rmdir")


class Killed(BaseException):
    """Not an error that anybody would catch."""


class Disk:
    """Kills the process at an operation on files, and knows what is then on the disk.

    Attributes:
        left: the operations until the kill; None for none.
        done: the operations so far.
        content: the bytes of each file at its last `fsync`, by its inode.
        names: the entries of each folder at its last `fsync`.
    """

    def __init__(self, monkeypatch):
        self.left, self.done = None, 0
        self.content, self.names = {}, {}
        for name in OPERATIONS:
            monkeypatch.setattr(os, name, self._counted(getattr(os, name), name == "fsync"))

    def _counted(self, plain, syncs):
        def operation(*args, **settings):
            self.step()
            return self.sync(*args) if syncs else plain(*args, **settings)

        return operation

    def step(self):
        self.done += 1
        if self.left == 0:
            raise Killed
        if self.left is not None:
            self.left -= 1

    def parts(self, number):
        """The content of a file in two parts, between which it may be killed."""
        yield b"%d " % number * 100
        self.step()
        yield b"%d " % number * 100

    def write(self, folder, number):
        files = {"state": self.parts(number), "0.rows": self.parts(number)}
        Versions(folder, "test").write(files, {"round": number})

    @contextlib.contextmanager
    def killed(self, at):
        self.left = at
        try:
            with contextlib.suppress(Killed):
                yield
        finally:
            self.left = None

    def sync(self, number):
        path = pathlib.Path(os.readlink(f"/proc/self/fd/{number}"))
        if path.is_dir():
            self.names[path] = {
                one.name: (one.is_dir(), one.stat().st_ino) for one in path.iterdir()
            }
        else:
            self.content[os.fstat(number).st_ino] = path.read_bytes()

    def after_a_loss_of_power(self, folder, to):
        """What was synchronized, and nothing else."""
        to.mkdir()
        for name, (is_folder, inode) in self.names.get(folder, {}).items():
            if is_folder:
                self.after_a_loss_of_power(folder / name, to / name)
            else:
                (to / name).write_bytes(self.content.get(inode, b""))
