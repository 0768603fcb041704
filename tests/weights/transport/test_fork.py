"""A process with connections of a weight group that forks: the child can leave, and changes nothing."""

from __future__ import annotations

import json
import subprocess
import sys

CHILDREN = {
    "exits": "pass",
    "closes and exits": "group.close(); group.close(); sender.close(); sender.close()",
    "drops everything": "del group, sender; gc.collect()",
    "forks again": "grandchild = os.fork(); grandchild and sys.exit(os.waitpid(grandchild, 0)[1])",
}
PARENT = """
import gc, json, os, sys, threading, time, torch
from tokenspeed_rl.weights.transport.group import WeightsGroup
from tokenspeed_rl.weights.transport.sender import WeightsSender

NAMED = {f"w{i}": torch.full((1000,), float(i)) for i in range(4)}
EXPECTED = [(name, tensor.dtype, tensor.shape) for name, tensor in NAMED.items()]
sender = WeightsSender("127.0.0.1", 0, 2, backend="gloo", timeout=60)
group = WeightsGroup("127.0.0.1", sender.master_port, 1, 2, backend="gloo", timeout=60)

def start():
    sending = threading.Thread(target=sender.send, args=(NAMED,))
    sending.start()
    return sending

def take(sending):
    for name, tensor in group.receive(EXPECTED, flattened=True, timeout=60):
        assert torch.equal(tensor, NAMED[name])
    group.acknowledge(None)
    sending.join(60)
    assert not sending.is_alive()

def status_of(child):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return "hung"

take(start())
statuses = {}
for name, code in json.loads(sys.argv[1]).items():
    sending = start()  # it waits, in the midst of a send, when the child appears
    child = os.fork()
    if child == 0:
        exec(code)
        sys.exit(0)
    statuses[name] = status_of(child)
    take(sending)
print(json.dumps(statuses))
"""


def test_forked_children_leave() -> None:
    """A8: a child exits soon, with 0, whatever it does to what it inherited, and the parent's goes on."""
    command = [sys.executable, "-c", PARENT, json.dumps(CHILDREN)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.stderr, done.returncode) == ("", 0)
    assert json.loads(done.stdout) == dict.fromkeys(CHILDREN, 0)
