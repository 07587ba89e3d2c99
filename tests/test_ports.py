"""Ports for programs that listen are those of one process of tests only."""

import os
import socket

from tests.ports import free_port


def test_processes_get_no_port_of_each_other_and_none_that_is_used() -> None:
    ours = {free_port() for _ in range(100)}
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        os.write(writing, " ".join(str(free_port()) for _ in range(100)).encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as file:
        theirs = {int(each) for each in file.read().split()}
    os.waitpid(pid, 0)
    assert len(ours) == len(theirs) == 100
    assert not ours & theirs


def test_ports_in_use_are_left_out() -> None:
    with socket.create_server(("127.0.0.1", used := free_port())):
        assert used not in {free_port() for _ in range(2000)}
