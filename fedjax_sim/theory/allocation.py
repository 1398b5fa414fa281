"""This module predicts the error that training reaches within a budget of bytes, joules or seconds.

A choice is a cohort size m, a deadline of a round and the bits of a number in a message. Clients have quadratic risks
with one Hessian, whose eigenvalues lie in [mu, L]. The server takes the mean of the messages that arrive.

Let k of N_F clients report, where N_F of N clients are in time. Let r = (1 - eta mu)^K, and p_0 = P(k = 0). In a round
without reports the model stays. A uniform cohort that reports is a uniform subset of the N_F clients. So the distance
from their optimum w_F has the second moment

    E |e'|^2 = (p_0 + (1 - p_0) r^2) E |e|^2 + E[(1 - r)^2 S_F^2 (N_F - k) / (k (N_F - 1)) + noise / k; k > 0]

S_F^2 is the variance of the optima of the clients in time, S^2 that of all clients, and `noise` is what gradients and
quantisation add to a message. The mean error contracts by p_0 + (1 - p_0) r. Late clients are late in every round, so
the model converges to w_F, and not to w*. If times do not depend on data, the clients in time are a uniform subset too:

    E |w_F - w*|^2 = S^2 (N - N_F) / (N_F (N - 1)),    E S_F^2 = S^2 N (N_F - 1) / (N_F (N - 1))

All of these are exact if mu = L, up to the model of quantisation. Otherwise they are upper bounds: the second moment is
a polynomial in r and in (1 - r) / mu with coefficients that are not negative, and both fall as the eigenvalue rises.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim import validate
from fedjax_sim.theory.quantization import expected_squared_error
from fedjax_sim.theory.timing import sampled_order_statistic
from fedjax_sim.validate import Positive

UNITS = ("bytes", "joules", "seconds")
ROUNDING = 1e-9  # relative: a budget of three rounds is not one of two because a quotient was rounded down
MOST_ROUNDS = 10**15


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedQuadratics:
    """N clients with quadratic risks of one Hessian, by their constants, and the local work of FedAvg.

    Args:
      population_size: N.
      dimension: d.
      strong_convexity: mu > 0, the least eigenvalue of the Hessian.
      smoothness: L >= mu, the largest eigenvalue; None = mu.
      step_size: eta in (0, 1 / L] of a local step.
      num_steps: K >= 1 local steps of a round.
      start: |w_0 - w*|^2 >= 0.
      heterogeneity: (1/N) sum_i |grad f_i(w*)|^2 >= 0, over all coordinates: `variance` of
        `metrics.gradient_heterogeneity` at w*.
      gradient_noise: variance per coordinate of one local stochastic gradient, >= 0.
      range: s > 0 of `transform.quantize(bits, range=s)`; None where no choice quantises. Clipping is not modelled.
      keeps_zeros: as in `transform.quantize`.

    Raises: ValueError, TypeError for values out of range, NaN and infinity included.

    >>> SharedQuadratics(population_size=9, dimension=1, strong_convexity=1.0, step_size=0.5, start=4.0).contraction
    0.5
    """

    population_size: int
    dimension: int
    strong_convexity: float
    smoothness: float | None = None
    step_size: float
    num_steps: int = 1
    start: float
    heterogeneity: float = 0.0
    gradient_noise: float = 0.0
    range: float | None = None
    keeps_zeros: bool = True

    def __post_init__(self) -> None:
        for name in ("population_size", "dimension", "num_steps"):
            validate.integer(name, getattr(self, name), 1)
        validate.positive("strong_convexity", self.strong_convexity)
        if self.smoothness is not None:
            validate.in_range("smoothness", self.smoothness, self.strong_convexity)
        smoothness = self.strong_convexity if self.smoothness is None else self.smoothness
        hint = f"At most 1 / L = {1 / smoothness:g}: the formulas need steps that do not overshoot."
        validate.in_range("step_size", self.step_size, 0, 1 / smoothness, open_low=True, hint=hint)
        for name in ("start", "heterogeneity", "gradient_noise"):
            validate.in_range(name, getattr(self, name), 0)
        if self.range is not None:
            validate.positive("range", self.range)
        validate.truth("keeps_zeros", self.keeps_zeros)

    @property
    def contraction(self) -> float:
        """r = (1 - eta mu)^K."""
        return (1 - self.step_size * self.strong_convexity) ** self.num_steps

    def message_noise(self, bits: int | None) -> float:
        """Computes E |noise|^2 of one message: of the gradients of K local steps, and d Delta^2 / 6 of rounding.

        Args:
          bits: of a number; None = floats, whose rounding is left out.

        Raises: ValueError for bits without a range.
        """
        factor = 1 - self.step_size * self.strong_convexity
        squares = self.num_steps if factor == 1 else (1 - factor ** (2 * self.num_steps)) / (1 - factor**2)
        noise = self.dimension * self.gradient_noise * self.step_size**2 * squares
        if bits is None:
            return noise
        if self.range is None:
            validate.fail("range", "a number where messages are quantised", None, "That of transform.quantize.")
        return noise + expected_squared_error(self.dimension, bits, self.range, keeps_zeros=self.keeps_zeros)

    def path(self, cohort_size: int, num_in_time: int | None = None, bits: int | None = None) -> ErrorPath:
        """Computes E |w_t - w*|^2 over cohorts, noise, and which clients are late, as a function of t.

        Args:
          cohort_size: m in [1, N] invited clients, drawn without replacement in every round.
          num_in_time: N_F in [1, N] clients that arrive before the deadline; None = all.
          bits: of a number in a message; None = floats.

        Guarantees: With one curvature the error is the mean over all cohorts and over all sets of late clients,
        enumerated (tests/theory/test_allocation.py::test_the_path_is_the_enumerated_one). With other eigenvalues it is
        an upper bound (::test_the_path_bounds_other_curvatures).
        """
        from scipy import stats

        size = self.population_size
        validate.integer("cohort_size", cohort_size, 1, size)
        in_time = size if num_in_time is None else num_in_time
        validate.integer("num_in_time", in_time, 1, size)
        reports = np.arange(1, min(cohort_size, in_time) + 1)
        probabilities = stats.hypergeom.pmf(reports, size, in_time, cohort_size)
        silence = float(stats.hypergeom.pmf(0, size, in_time, cohort_size))
        contraction = self.contraction
        square_contraction = silence + (1 - silence) * contraction**2
        # S^2 / (N - 1); of one client there is no spread.
        spread = self.heterogeneity / self.strong_convexity**2 / max(size - 1, 1)
        # The factors (N_F - 1) of S_F^2 and of the finite population correction cancel.
        sampling = (1 - contraction) ** 2 * spread * size / in_time * (in_time - reports) / reports
        added = float(probabilities @ (sampling + self.message_noise(bits) / reports))
        bias = spread * (size - in_time) / in_time
        variance = added / (1 - square_contraction)
        return ErrorPath(
            variance + bias,
            self.start + bias - variance,
            square_contraction,
            2 * bias,
            silence + (1 - silence) * contraction,
        )


class ErrorPath(NamedTuple):
    """The expected squared distance after t rounds: limit + square_part a^t - mean_part b^t, where a <= b < 1."""

    limit: float
    square_part: float
    square_contraction: float  # a
    mean_part: float  # >= 0
    mean_contraction: float  # b

    def error(self, num_rounds: int) -> float:
        """Computes E |w_t - w*|^2 after t rounds."""
        falling = self.square_part * self.square_contraction**num_rounds
        return self.limit + falling - self.mean_part * self.mean_contraction**num_rounds

    def best_rounds(self, most: int) -> int:
        """Finds the fewest rounds in [1, most] after which the error is least.

        The error may rise from the first round on, if the start is below the floor. It may also fall and then rise, if
        late clients are never heard.

        Args:
          most: at least 1.

        Guarantees: The number is that of a search over all rounds
        (tests/theory/test_allocation.py::test_best_rounds_are_those_of_a_search).
        """
        # E_(t+1) - E_t = rising b^t - falling a^t, which changes its sign at most once.
        falling = self.square_part * (1 - self.square_contraction)
        rising = self.mean_part * (1 - self.mean_contraction)
        if falling <= rising or self.mean_contraction == 0:
            return 1
        if rising == 0 or self.square_contraction == self.mean_contraction:
            return most
        turn = math.log(falling / rising) / math.log(self.mean_contraction / self.square_contraction)
        return min(max(math.ceil(turn), 1), most)


class ClientCosts(NamedTuple):
    """What a round costs each client, if nothing stops the client; `instruments.client_costs` measures it.

    A cost that is not known is None, and a budget in its unit is refused. It never counts as zero.
    """

    bytes_down: float  # of the broadcast, to each invited client
    bytes_up: float  # of a message
    seconds: Any = None  # [3, N] of download, local work and message; the same in every round
    joules: Any = None  # [3, N] of the same phases
    overhead_seconds: float = 0.0  # of the server in each round


class Choice(NamedTuple):
    """A choice of cohort, deadline and bits, with what one round costs and what the budget buys."""

    cohort_size: int
    deadline: float | None  # seconds; None = the server waits for all
    bits: int | None  # of a number in a message; None = floats
    reports: float  # the expected number of messages that arrive in a round
    costs: dict[str, float]  # expected bytes, joules and seconds of a round, as far as they are known
    num_rounds: int  # at most as many as the budget affords; 0 = not feasible
    error: float  # E |w - w*|^2 after these rounds; infinite if not feasible

    @property
    def feasible(self) -> bool:
        """Tells whether the budget affords a round, and whether any client is in time."""
        return self.num_rounds > 0


class Allocation(NamedTuple):
    """All choices in the order of the candidates, and the feasible one with the least error."""

    choices: tuple[Choice, ...]
    best: Choice


@validate.named_arguments
def allocate(
    problem: SharedQuadratics,
    costs_by_bits: Mapping[int | None, ClientCosts],
    *,
    cohort_sizes: Sequence[int],
    deadlines: Sequence[float | None] = (None,),
    bytes: Positive | None = None,
    joules: Positive | None = None,
    seconds: Positive | None = None,
) -> Allocation:
    """Finds the cohort size, deadline and bits whose error is least within a budget of bytes, joules or seconds.

    Candidates are all combinations of `cohort_sizes`, `deadlines` and the keys of `costs_by_bits`. Each makes as many
    rounds as its expected costs allow; fewer, if the error would rise again. All clients that are invited are paid for.
    At a deadline late clients stop, as under `sampling.with_deadline`: energy of a phase counts in proportion to its
    time, and a message on its way counts as sent.

    Args:
      problem: the clients and their local work, `SharedQuadratics`.
      costs_by_bits: what a round costs the clients, for each number of bits; None = floats.
      cohort_sizes: m, invited clients in [1, N].
      deadlines: seconds > 0 after the invitation; None = wait for all.
      bytes: of all clients, both ways, in all rounds; None = no limit.
      joules: of all clients, in all rounds; None = no limit.
      seconds: of all rounds; None = no limit.

    Returns: `Allocation`. Of equal errors, the choice that spends the smaller share of the budget is the best, and then
    the first.

    Raises: ValueError without any limit, for a limit or a deadline whose costs are not known, and for a budget that
    affords no choice a round: the error names the smallest one that does. ValueError, TypeError for values out of
    range.

    Guarantees: A larger budget never gives a larger error
    (tests/theory/test_allocation.py::test_a_larger_budget_is_never_worse). A budget is feasible from the one on that
    the error names (::test_the_error_names_the_smallest_feasible_budget). On a large population the best cohort for
    bytes is that of a closed form (::test_best_cohort_for_bytes). Costs and errors are those of simulated rounds
    (tests/study/test_budget.py::test_predictions_hold).

    References: Cochran 1977, theorem 2.2 (finite population correction); Nishio and Yonetani 2019 (deadlines); derived
    above.

    >>> problem = SharedQuadratics(
    ...     population_size=100, dimension=1, strong_convexity=1.0, step_size=0.5, start=100.0, heterogeneity=1.0
    ... )
    >>> best = allocate(problem, {None: ClientCosts(4, 4)}, cohort_sizes=[1, 10, 100], bytes=800.0).best
    >>> best.cohort_size, best.num_rounds, round(best.error, 4)
    (10, 10, 0.0304)
    """
    limits = {name: limit for name, limit in zip(UNITS, (bytes, joules, seconds), strict=True) if limit is not None}
    if not limits:
        validate.fail("bytes, joules, seconds", "at least one limit", None, "Without a limit more is always better.")
    validate.part("problem", problem, SharedQuadratics)
    for name, values in (("cohort_sizes", cohort_sizes), ("deadlines", deadlines)):
        validate.sequence(name, values)
    if not isinstance(costs_by_bits, Mapping) or not costs_by_bits:
        validate.fail("costs_by_bits", "a dict of bits (None = floats) to ClientCosts", costs_by_bits, error=TypeError)
    choices, paths = [], []
    for bits, costs in costs_by_bits.items():
        phases = _phases(f"costs_by_bits[{bits}]", costs, problem.population_size, {*limits}, deadlines)
        for deadline in deadlines:
            in_time, client_costs, times = _at_deadline(costs, phases, deadline, problem.population_size)
            for cohort_size in cohort_sizes:
                validate.integer("cohort_sizes", cohort_size, 1, problem.population_size)
                per_round = {name: cohort_size * cost for name, cost in client_costs.items()}
                if times is not None:
                    slowest = sampled_order_statistic(times, cohort_size, cohort_size)
                    per_round["seconds"] = slowest + costs.overhead_seconds
                reports = cohort_size * in_time / problem.population_size
                choices.append(
                    Choice(
                        cohort_size=cohort_size,
                        deadline=deadline,
                        bits=bits,
                        reports=reports,
                        costs=per_round,
                        num_rounds=0,
                        error=math.inf,
                    )
                )
                paths.append(problem.path(cohort_size, in_time, bits) if in_time else None)
    bought = [_bought(choice, path, limits) for choice, path in zip(choices, paths, strict=True)]
    feasible = [choice for choice in bought if choice.feasible]
    if not feasible:
        _fail_as_infeasible(bought, limits, deadlines)
    # `min` returns the first of equal ones.
    best = min(feasible, key=lambda choice: (choice.error, _share(choice, limits)))
    return Allocation(tuple(bought), best)


def _phases(name: str, costs: ClientCosts, size: int, limits: set[str], deadlines: Sequence) -> dict[str, np.ndarray]:
    """Checks the costs of clients, and returns those of the phases that are known.

    Args:
      name: of `costs` in error messages, such as "costs_by_bits[8]".
      costs: of a round, for one number of bits.
      size: N, the number of clients.
      limits: the units that have a limit, of "bytes", "joules" and "seconds".
      deadlines: seconds > 0; None = no deadline.

    Returns: "seconds" and "joules" -> [3, N] float64 of download, local work and message, as far as they are known.

    Raises: ValueError for numbers out of range, and for a cost that is not known although a limit or a deadline needs
      it. TypeError if `costs` is no `ClientCosts`.
    """
    validate.part(name, costs, ClientCosts)
    validate.positive(f"{name}.bytes_down", costs.bytes_down, wide=True)
    validate.positive(f"{name}.bytes_up", costs.bytes_up, wide=True)
    validate.in_range(f"{name}.overhead_seconds", costs.overhead_seconds, 0)
    for deadline in deadlines:
        if deadline is not None:
            validate.positive("deadlines", deadline)
    needed = limits | ({"seconds"} if any(deadline is not None for deadline in deadlines) else set())
    phases = {}
    for unit in ("seconds", "joules"):
        values = getattr(costs, unit)
        if values is None:
            if unit in needed:
                hint = "An unknown cost is no cost of zero: instruments.client_costs measures it."
                validate.fail(f"{name}.{unit}", f"numbers for a limit of {unit} or a deadline", None, hint)
            continue
        array = np.asarray(values, np.float64)
        if array.shape != (3, size) or not (np.isfinite(array) & (array >= 0)).all():
            rule = f"finite numbers >= 0, [3, {size}], of download, local work and message"
            validate.fail(f"{name}.{unit}", rule, f"shape {array.shape}" if array.shape != (3, size) else array)
        if not (array.sum(0) > 0).all():
            hint = f"Devices without {unit} have None: an unknown cost is no cost of zero."
            validate.fail(f"{name}.{unit}", "more than 0 for every client", 0.0, hint)
        phases[unit] = array
    return phases


def _at_deadline(
    costs: ClientCosts, phases: Mapping[str, np.ndarray], deadline: float | None, size: int
) -> tuple[int, dict[str, float], np.ndarray | None]:
    """Computes what an invited client costs if a round ends at a deadline.

    A client's phases end at e_1 <= e_2 <= e_3 seconds. It is in time if e_3 is at most the deadline D, and then all
    joules are spent. It sends a message if it is in time, or if e_2 < D. If it is late, a phase of s > 0 seconds that
    ends at e runs for t = min(max(D - (e - s), 0), s) seconds and costs t / s of its joules. A phase of 0 seconds costs
    all of them.

    Args:
      costs: bytes of a round.
      phases: as from `_phases`; without "seconds" all clients are in time.
      deadline: D, seconds after the invitation; None = the server waits for all.
      size: N.

    Returns: (number of clients in time, 0 to N; mean bytes, and joules if they are known, of an invited client; [N]
      seconds until each client is done or stopped, None where times are not known).
    """
    known_joules = phases.get("joules")
    if "seconds" not in phases:
        client_costs = {"bytes": costs.bytes_down + costs.bytes_up}
        if known_joules is not None:
            client_costs["joules"] = float(known_joules.sum(0).mean())
        return size, client_costs, None
    seconds = phases["seconds"]
    ends = np.cumsum(seconds, axis=0)  # e_1, e_2, e_3
    # Whole ticks and decimal deadlines are not exact in float64.
    end = math.inf if deadline is None else deadline * (1 + ROUNDING)
    is_in_time = ends[-1] <= end
    # A message that is on its way at the deadline counts as sent.
    is_sent = is_in_time | (ends[1] < end * (1 - 2 * ROUNDING))
    client_costs = {"bytes": costs.bytes_down + costs.bytes_up * float(is_sent.mean())}
    if known_joules is not None:
        passed = np.clip(end - (ends - seconds), 0, seconds)  # seconds of each phase before the deadline
        # A phase that takes no time is spent as a whole.
        shares = np.where(seconds > 0, passed / np.where(seconds > 0, seconds, 1), 1)
        client_costs["joules"] = float((known_joules * np.where(is_in_time, 1, shares)).sum(0).mean())
    return int(is_in_time.sum()), client_costs, np.minimum(ends[-1], end)


def _bought(choice: Choice, path: ErrorPath | None, limits: Mapping[str, float]) -> Choice:
    """Fills in the rounds that a budget affords, and the error after them."""
    affordable = min(limit / choice.costs[name] for name, limit in limits.items()) * (1 + ROUNDING)
    if path is None or affordable < 1:
        return choice
    num_rounds = path.best_rounds(math.floor(min(affordable, MOST_ROUNDS)))
    return choice._replace(num_rounds=num_rounds, error=path.error(num_rounds))


def _share(choice: Choice, limits: Mapping[str, float]) -> float:
    """Computes the largest share of a limit that the rounds of a choice spend."""
    return max(choice.num_rounds * choice.costs[name] / limit for name, limit in limits.items())


def _fail_as_infeasible(choices: Sequence[Choice], limits: Mapping[str, float], deadlines: Sequence) -> None:
    """Raises ValueError that names the smallest budget with a feasible choice."""
    heard = [choice for choice in choices if choice.reports > 0]
    if not heard:
        validate.fail("deadlines", "one that some client meets", list(deadlines), "None waits for all.")
    # The budget that has to grow least; with one limit it is the cheapest round.
    cheapest = min(heard, key=lambda choice: max(choice.costs[name] / limit for name, limit in limits.items()))
    needed = ", ".join(f"{name}={max(limit, cheapest.costs[name])!r}" for name, limit in limits.items())
    what = f"cohort_size={cheapest.cohort_size}, deadline={cheapest.deadline}, bits={cheapest.bits}"
    given = ", ".join(f"{name}={limit!r}" for name, limit in limits.items())
    validate.fail(", ".join(limits), f"a budget of at least one round, such as {needed}", given, f"That is {what}.")
