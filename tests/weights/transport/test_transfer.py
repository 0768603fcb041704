"""Weights that go from a sender to receivers over a group of their own."""

from __future__ import annotations

import itertools
import os
import random
import socket
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tokenspeed_rl.errors import RequestError
from tokenspeed_rl.requests import InitWeightsUpdateGroupReqInput
from tokenspeed_rl.weights.transport.groups import Groups

TORCHRUN = {
    "MASTER_ADDR": "192.0.2.77",
    "MASTER_PORT": "1",
    "RANK": "3",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "8",
    "GROUP_RANK": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "none",
}


def tensors(seed: int = 0) -> dict[str, Tensor]:
    """Every float dtype, odd sizes, none and zero dimensions, strides, a NaN with a payload."""
    make = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make)

    return {
        "embed": normal(31, 7),
        "half": normal(3, 5).half(),
        "odd": normal(13).bfloat16(),
        "double": normal(2, 2, 3).double(),
        "scalar": normal(),
        "empty": normal(0, 4),
        "transposed": normal(9, 6).t(),
        "strided": normal(4, 10)[:, ::3],
        "nan": torch.tensor([0x7FC12345, 0x7F800001], dtype=torch.int32).view(torch.float32),
    }


@pytest.mark.parametrize("flattened, bucket_bytes", [(False, 1), (True, 1), (True, 200), (True, 1 << 20)])
@pytest.mark.parametrize("kind", ["mapping", "shuffled list", "view", "iterator"])
def test_every_bit_arrives(ends: Any, same: Any, flattened: bool, bucket_bytes: int, kind: str) -> None:
    """E1, E5: any format, bucket size and source gives the same bits, whatever dtypes, shapes and strides."""
    sender, group = ends.pair()
    for seed in range(2):  # the second time over connections that are there
        named = tensors(seed)
        shuffled = random.Random(seed).sample(list(named.items()), len(named))
        reverse = dict(reversed(named.items()))
        source = {
            "mapping": named,
            "shuffled list": shuffled,
            "view": reverse.items(),
            "iterator": iter(named.items()),
        }[kind]
        got = ends.update(sender, group, named, source, flattened, bucket_bytes)
        assert same(got, named)


def test_buckets_come_in_the_senders_order(ends: Any, same: Any) -> None:
    """E1: in buckets, an iterator may give the weights in another order than the receivers named them."""
    sender, group = ends.pair()
    named = tensors()
    assert same(ends.update(sender, group, named, iter(reversed(named.items())), True, 100), named)


def test_parameters_of_a_model_can_be_sent(ends: Any) -> None:
    """Parameters that require gradients go as they are, and come without a history."""
    sender, group = ends.pair()
    layer = torch.nn.Linear(3, 2)
    got = ends.update(sender, group, dict(layer.named_parameters()), layer.named_parameters(), False)
    assert torch.equal(got["weight"], layer.weight) and not got["weight"].requires_grad


def test_two_receivers_get_the_same(ends: Any, same: Any) -> None:
    """One sender serves several ranks at once, and returns when the last has everything."""
    sender, named = ends.sender(world_size=3), tensors()
    groups = [ends.receiver(sender, rank, world_size=3) for rank in (1, 2)]
    for flattened in (True, False):
        sending = ends.start(sender.send, named, 300)
        takes = [ends.start(ends.take, group, ends.expected(named), flattened) for group in groups]
        assert all(same(take.result(30), named) for take in takes)
        sending.result(30)


@pytest.mark.parametrize("flattened", [False, True])
def test_sender_may_overwrite_its_tensors_after_send(ends: Any, flattened: bool) -> None:
    """E11: `send` returns after the receiver has taken everything, and then nothing reads its buffers."""
    sender, group = ends.pair()
    live = {"a": torch.full((50_000,), 1.0), "b": torch.full((3,), 2.0)}
    sending = ends.start(sender.send, live)
    got = [tensor for _, tensor in group.receive(ends.expected(live), flattened=flattened, timeout=20)]
    assert not sending.done()  # everything has arrived, but the engine hasn't said that it is done
    group.acknowledge(None)
    sending.result(30)
    for tensor in live.values():
        tensor.fill_(-1)
    assert [tensor.unique().item() for tensor in got] == [1.0, 2.0]


@pytest.mark.parametrize("flattened", [False, True])
def test_nothing_received_is_kept(ends: Any, flattened: bool) -> None:
    """E10: one tensor, or one bucket, is held at a time: the one before is gone when the next comes."""
    sender, group = ends.pair()
    named = {f"w{i}": torch.full((256,), float(i)) for i in range(5)}
    sending = ends.start(sender.send, named, 1024)
    alive: list[int] = []
    held: list[weakref.ref[Any]] = []
    for _, tensor in group.receive(ends.expected(named), flattened=flattened, timeout=20):
        held.append(weakref.ref(tensor))
        alive.append(sum(ref() is not None for ref in held))
        del tensor
    group.acknowledge(None)
    sending.result(30)
    assert alive == [1] * 5 and not any(ref() is not None for ref in held)


def test_senders_that_start_at_once_find_ports(ends: Any, same: Any) -> None:
    """E9: four groups start at the same moment on one host, on ports that the system picked."""
    barrier, named = threading.Barrier(4), [tensors(seed) for seed in range(4)]

    def run(seed: int) -> tuple[int, dict[str, Tensor]]:
        barrier.wait(20)
        sender, group = ends.pair()
        return sender.master_port, ends.update(sender, group, named[seed])

    results = [job.result(30) for job in [ends.start(run, seed) for seed in range(4)]]
    assert len({port for port, _ in results}) == 4
    assert all(same(got, sent) for (_, got), sent in zip(results, named, strict=True))


def test_one_engine_in_several_groups(ends: Any, same: Any) -> None:
    """Groups of different names are independent, also while both transfer; each can be left and rejoined."""
    groups, senders = Groups(), {name: ends.sender(group_name=name) for name in ("policy", "critic")}
    ends.made.append(type("All", (), {"close": staticmethod(groups.close_all)}))
    fields = {"master_address": "127.0.0.1", "rank_offset": 0, "world_size": 2, "backend": "gloo"}

    def join(name: str) -> None:
        port = senders[name].master_port
        groups.init(
            InitWeightsUpdateGroupReqInput(master_port=port, group_name=name, **fields),
            device="cpu",
            tp_rank=1,
        )

    for name in senders:
        join(name)
    assert sorted(groups.names()) == ["critic", "policy"]
    named = {name: tensors(seed) for seed, name in enumerate(senders)}
    steps = {
        name: groups.get(name).receive(ends.expected(named[name]), flattened=False, timeout=20)
        for name in senders
    }
    sending = [ends.start(sender.send, named[name]) for name, sender in senders.items()]
    got: dict[str, dict[str, Tensor]] = {name: {} for name in senders}
    for _ in range(len(tensors())):
        for name in senders:  # one tensor of each in turn
            key, tensor = next(steps[name])
            got[name][key] = tensor.clone()
    for name in senders:
        assert next(steps[name], None) is None
        groups.get(name).acknowledge(None)
        assert same(got[name], named[name])
    assert all(job.result(30) is None for job in sending)

    with pytest.raises(RequestError, match=r"'policy'.*destroy_weights_update_group"):
        join("policy")
    groups.destroy("policy")
    for act in (groups.get, groups.destroy):
        with pytest.raises(RequestError, match=r"no weight group.*'policy'.*critic"):
            act("policy")
    join("policy")
    assert same(ends.update(senders["policy"], groups.get("policy"), named["policy"]), named["policy"])


def test_rendezvous_listens_on_its_address_alone(ends: Any) -> None:
    """Whoever reaches the store can write to it, so other interfaces of the machine must refuse."""
    port = ends.sender().master_port
    socket.create_connection(("127.0.0.1", port), 5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5)


def test_a_host_name_will_do(ends: Any) -> None:
    """`master_address` may be a name, at both ends."""
    sender = ends.sender(master_address="localhost")
    assert ends.works(sender, ends.receiver(sender))


def test_without_and_within_torchrun(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables that torchrun sets are neither read nor changed, and no default group appears."""
    assert ends.works(*ends.pair()) and not dist.is_initialized()
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    assert ends.works(*ends.pair())
    assert dict(os.environ) == before and not dist.is_initialized()


def test_default_process_group_stays_the_trainers(ends: Any) -> None:
    """A default group that is there works on untouched, and stands in nobody's way."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        default, count = dist.group.WORLD, itertools.count()
        groups = dict(dist.distributed_c10d._world.pg_map)
        assert ends.works(*ends.pair())
        assert dist.group.WORLD is default and dist.distributed_c10d._world.pg_map == groups
        total = torch.tensor([float(next(count) + 5)])
        dist.all_reduce(total)
        assert total.item() == 5
    finally:
        dist.destroy_process_group()
