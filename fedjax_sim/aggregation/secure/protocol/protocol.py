"""Secure aggregation as it is deployed, between clients and a server on one machine: real keys, seals, masks, shares.

It ends in the integers of `secure_sum`, which simulates it inside of a compiled round. The server is
honest-but-curious, or, with `signed`, may say anything: keys are signed, and clients compare what it told them before
they open a share. Secrets follow from a seed, so that runs repeat; this is a simulation, and no deployment.
"""

from __future__ import annotations

import secrets
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.aggregation.secure.common import check_majority, check_survivors_connected
from fedjax_sim.aggregation.secure.masks import Circle, Stages
from fedjax_sim.aggregation.secure.protocol import primitives as crypto
from fedjax_sim.aggregation.secure.protocol.parties import Asked, Client, Known, Refused, Server, Signed
from fedjax_sim.aggregation.secure.ring import Ring

__all__ = ["SecureRun", "client_down_bytes", "client_up_bytes", "run_secure_sum"]


class SecureRun(NamedTuple):
    """A run of the protocol. Bytes are those of keys, seals, packed elements, shares and flags, without ids."""

    sum: np.ndarray | None  # [d] int64 in [-q/2, q/2), q the ring's modulus; None = aborted
    aborted: bool
    masked: np.ndarray  # [m, d] uint64 elements that the server received; 0 where nothing came
    client_bytes: np.ndarray  # [m, 4] int64 that each client sent in each step: advertise, share, upload, unmask (and
    # its word before)
    server_bytes: np.ndarray  # [m, 4] int64 that the server sent each client after each step


def client_up_bytes(neighbours: int, keeps_share: bool, dimension: int, ring: Ring, signed: bool = False) -> int:
    """The bytes that a client sends in a round that nobody leaves.

    Guarantees: those of a run (tests/aggregation/secure/protocol/test_protocol.py::test_bytes).

    >>> client_up_bytes(99, True, 1000, Ring(32))
    15482
    """
    sealed = neighbours * (2 * crypto.SHARE_BYTES + crypto.SEAL_BYTES)
    held = (neighbours + keeps_share) * crypto.SHARE_BYTES
    words = 2 * crypto.SIGNATURE_BYTES if signed else 0
    return 2 * crypto.KEY_BYTES + sealed + -(-dimension * ring.bits // 8) + held + words


def client_down_bytes(num_clients: int, neighbours: int | None, signed: bool = False) -> int:
    """The bytes that the server sends a client in a round that nobody leaves, beside the model: the others' keys, seals
    with shares, a flag for each share that it is asked for, and the others' signatures.

    Args:
      neighbours: of each client on a circle; None: all are each other's.

    Guarantees: those of a run (tests/aggregation/secure/protocol/test_protocol.py::test_bytes,
    tests/aggregation/secure/protocol/test_active_server.py::test_bytes).

    >>> client_down_bytes(100, None)
    14467
    """
    others = num_clients - 1 if neighbours is None else neighbours
    held = others + (neighbours is None)
    sealed = others * (2 * crypto.SHARE_BYTES + crypto.SEAL_BYTES)
    received = others * 2 * crypto.KEY_BYTES + sealed + -(-held // 8)
    if not signed:
        return received
    heard = others if neighbours is None else min(2 * others, num_clients - 1)
    flags = 0 if neighbours is None else -(-neighbours // 8)
    return received + others * crypto.SIGNATURE_BYTES + heard * (crypto.SIGNATURE_BYTES + flags)


def run_secure_sum(
    messages: np.ndarray,
    ring: Ring,
    threshold: int,
    *,
    graph: Circle | None = None,
    stages: Stages | None = None,
    advertised: np.ndarray | None = None,
    min_messages: int | None = None,
    signed: bool = False,
    seed: int | bytes | None = None,
) -> SecureRun:
    """Runs secure aggregation between m clients and a server: X25519, HKDF, AES-GCM, AES-CTR masks, Shamir's shares.

    Bytes and masks grow with m times neighbours, the arithmetic of shares with that times the threshold.

    Args:
      messages: [m, d] integers.
      ring: which ones are summed in: `Ring(bits)`, or `Ring(31, prime=True)`.
      threshold: t, the shares that open a secret; at most the holders of one, and more than half of them on a circle.
      graph: who shares with whom: `secure_masks.circle(key, m, k)`; None: all with all.
      stages: who is left after each step; None: all.
      advertised: [m] bool who sends keys; by default all do.
      min_messages: fewer uploads abort; by default the threshold.
      signed: against a server that lies: Ed25519 signatures on keys, and before shares are opened a round in which
        those who answer sign whose they are asked for; each gets the words of who holds the same shares. The threshold
        is then more than half of a secret's holders; with c of them on the server's side 2 t > h + c. Identities, and
        the graph, are known beforehand and not from the server. An honest server's sums and aborts are the same.
      seed: of all secrets, an integer of at least 0 or bytes; None: the operating system's.

    Raises: ImportError without `cryptography`, naming the extra; ValueError or TypeError for what does not fit.

    Guarantees: the plain sum modulo q of those who uploaded, the result of `secure_sum` for the same stages, and an
    abort without a number in the same cases (tests/aggregation/secure/protocol/test_protocol.py); `secure_sum_cost`'s
    bits but for what seals and wider shares add (::test_bytes); with `signed` lies about keys are refused, and of lies
    about who uploaded none opens both secrets of a client, or a sum of fewer than t
    (tests/aggregation/secure/protocol/test_active_server.py).

    References: Bonawitz et al. 2017, figure 4 (with its underlined parts, `signed`) and section 6.2; Bell, Bonawitz,
    Gascon, Lepoint and Raykova 2020, algorithm 2.

    >>> run_secure_sum(np.array([[1, -2], [3, 4], [5, 6]]), Ring(32), 2, seed=0).sum.tolist()  # doctest: +SKIP
    [9, 8]
    """
    messages, graph, stages, sent_keys = _checked(messages, ring, threshold, graph, stages, advertised)
    least = threshold if min_messages is None else min_messages
    validate.integer("min_messages", least)
    if seed is not None and not isinstance(seed, bytes):
        validate.integer("seed", seed, 0)
    crypto.check_installed()
    if not isinstance(seed, bytes):
        seed = secrets.token_bytes(32) if seed is None else str(seed).encode()
    number, size = messages.shape
    client_bytes, server_bytes = sent = np.zeros((2, number, 4), np.int64)
    there = [np.flatnonzero(x).tolist() for x in (sent_keys, *stages)]
    server, clients = _parties(ring, threshold, graph, there[0], seed, signed)
    for u in there[0]:
        server.keys[u] = clients[u].advertise()
        client_bytes[u, 0] = sum(map(len, server.keys[u]))
    for u in there[0]:
        server_bytes[u, 0] = sum(len(x) for keys in server.keys_for(u).values() for x in keys)
    for u in there[1]:
        server.sealed[u] = clients[u].share(server.keys_for(u))
        client_bytes[u, 1] = sum(map(len, server.sealed[u].values()))
    for u in there[1]:
        server_bytes[u, 1] = sum(map(len, server.seals_for(u).values()))
    masked, total = np.zeros((number, size), np.uint64), None
    try:
        for u in there[2]:
            packed = clients[u].upload(server.seals_for(u), messages[u])
            masked[u] = server.masked[u] = crypto.unpacked(ring, packed, size)
            client_bytes[u, 2] = len(packed)
        if len(server.masked) >= least and not graph.too_small:
            total = _unmasked(server, clients, there[3], signed, sent)
    except Refused:  # too few hold what is needed: the server would get no sum from an answer
        total = None
    return SecureRun(
        None if total is None else crypto.centered_representatives(ring, total), total is None, masked, *sent
    )


def _parties(ring, threshold, graph, advertising, seed, signed) -> tuple[Server, dict[int, Client]]:
    """The server, and the clients by slot."""
    around = {u: [int(x) for x in graph.others(u, graph.distances) if x != u] for u in range(len(graph.order))}
    keeps, known = bool((graph.distances == 0).any()), None
    if not keeps:
        check_survivors_connected(threshold, len(graph.distances))
    if signed:
        check_majority(threshold, len(graph.distances))
        known = Known(around, {})
    drawn = {u: crypto.random_bytes(seed, f"client {u}", crypto.KEY_BYTES) for u in advertising}
    clients = {u: Client(u, ring, threshold, keeps, drawn[u], known) for u in advertising}
    if signed:
        known.identities.update({u: client.identity for u, client in clients.items()})
    return Server(ring, threshold, around, keeps), clients


def _unmasked(server, clients, answering, signed, sent) -> np.ndarray | None:
    """Step 4, and the clients' words before it: the sum as elements, None without enough shares; counts `sent`."""
    client_bytes, server_bytes = sent
    for u in server.masked:
        server_bytes[u, 3] = _flags(server.ask(u))
    for u in answering if signed else ():
        asked = server.ask(u)
        server.signed[u] = Signed(asked, clients[u].sign(asked))
        client_bytes[u, 3] = crypto.SIGNATURE_BYTES
    answers = {}
    for u in answering:
        for word in server.signed_for(u).values():  # where all hold shares of all, each knows what the others signed
            server_bytes[u, 3] += crypto.SIGNATURE_BYTES + (0 if server.keeps_share else _flags(word.asked))
        answers[u] = clients[u].answer(server.ask(u), server.signed_for(u))
        client_bytes[u, 3] += sum(map(len, answers[u])) * crypto.SHARE_BYTES
    return server.total(answers)


def _flags(asked: Asked) -> int:
    """Bytes of a flag for each client that is asked about."""
    return -(-(len(asked.uploaded) + len(asked.left)) // 8)


def _checked(messages, ring, threshold, graph, stages, advertised):
    """Arguments as NumPy arrays: (messages, graph, stages, advertised)."""
    messages = np.asarray(messages)
    if messages.ndim != 2 or messages.dtype.kind not in "iu" or messages.dtype == np.uint64:
        found = f"{messages.dtype}{list(messages.shape)}"
        validate.fail("messages", "integers [clients, numbers], at most int64", found, error=TypeError)
    number = len(messages)
    if graph is None:
        everyone = np.arange(number)
        graph = Circle(everyone, everyone, everyone, number)
    graph = Circle(*map(np.asarray, graph))
    validate.integer("threshold", threshold, 1, max(len(graph.distances), 1))
    stages = Stages(*np.ones((3, number), bool)) if stages is None else Stages(*(np.asarray(x, bool) for x in stages))
    advertised = np.ones(number, bool) if advertised is None else np.asarray(advertised, bool)
    steps = (advertised, *stages)
    if any(len(x) != number for x in (graph.order, *steps)):
        validate.fail("stages", f"flags for each of {number} clients", [len(x) for x in steps], "And a graph of them.")
    if any((after & ~before).any() for before, after in pairwise(steps)):
        validate.fail("stages", "each step within the one before", "a client that comes back")
    return messages, graph, stages, advertised
