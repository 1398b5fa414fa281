"""This module writes the reading of `leakage`: paragraphs in plain words from the measured numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fedjax_sim.study.findings import Comparison
from fedjax_sim.study.leakage.defences import HIDDEN

# Quantities of the study that the reading quotes.
CLOSED = "PSNR, closed form (dB)"
OPTIMISED = "PSNR, optimised (dB)"
LABELS = "labels recovered"
AUC = "membership AUC"
ADVANTAGE = "membership advantage"


class _Numbers:
    """A `_Numbers` holds the comparisons of the study, by defence and quantity, with methods that format them."""

    def __init__(self, comparisons: Sequence[Comparison]):
        self.rows = {(comparison.conditions["defence"], comparison.quantity): comparison for comparison in comparisons}

    def of(self, defence: str, quantity: str) -> float:
        """Returns a measured number."""
        return self.rows[defence, quantity].measured

    def share(self, defence: str, quantity: str) -> str:
        """Returns a measured share in per cent."""
        return f"{100 * self.of(defence, quantity):.0f} %"

    def bound(self, defence: str) -> float:
        """Returns the largest advantage that theory allows."""
        return self.rows[defence, ADVANTAGE].predicted or 0.0

    def nearest(self, defence: str) -> str:
        """Returns the PSNR of the attack whose pictures are nearer to the truth."""
        values = [self.rows[defence, name].measured for name in (CLOSED, OPTIMISED) if (defence, name) in self.rows]
        return f"{max(values):.0f} dB"


def leakage_reading(found: Sequence[Comparison], options: dict[str, Any]) -> Iterator[str]:
    """Yields paragraphs in plain words that say what the numbers of the study mean.

    Args:
      found: the comparisons of the study.
      options: the study's options.
    """
    numbers = _Numbers(found)
    yield from _batches(numbers, options)
    yield from _noise(numbers, options)
    yield from _compression(numbers, options)
    yield from _sums(numbers, options)
    names = [defence for defence, quantity in numbers.rows if quantity == AUC and defence.startswith("loss of")]
    before, after = (numbers.of(name, AUC) for name in names)
    yield (
        f"A trained model leaks by itself: its loss tells members with AUC {before:.2f} before training and "
        f"{after:.2f} once it knows them by heart."
    )
    yield (
        "The scores are kind to the attacker: of all pictures that an attack makes the one nearest to the truth "
        "counts, and the figure shows the attack that came nearer. It knows the model, the learning rate and the "
        "numbers of examples and of steps. A better idea of what digits look like, more rounds, or a server that "
        "sends models made to leak would rebuild more: a defence that fails here is broken, one that holds here is as "
        "good as its proof."
    )


def _batches(numbers: _Numbers, options: dict[str, Any]) -> Iterator[str]:
    """Writes what batch sizes and local steps do.

    Args:
      numbers: the comparisons of the study.
      options: the study's options; the largest of `batch_sizes` is quoted.

    Yields: two paragraphs.
    """
    largest_batch = f"batch of {max(options['batch_sizes'])}"
    yield (
        "A message of one example is that example. Each output of the first layer gives it as the quotient of two "
        f"numbers, to {numbers.of('batch of 1', 'error of a pixel'):.1g} of the range of a pixel, and its label, "
        "however deep the net. Clipping only shortens the message, and protects nobody. (60 dB is the most that is "
        "counted: a difference that nobody sees.)"
    )
    yield (
        "More examples mix, but not at once: behind a ReLU one example alone may reach an output. Of a batch of 8 the "
        f"rebuilt pictures have {numbers.nearest('batch of 8')}, of a {largest_batch} "
        f"{numbers.nearest(largest_batch)}, and the mean digit, for which no message is needed, "
        f"{numbers.nearest('the mean digit')}. {numbers.share('batch of 8', LABELS)} of the labels in a batch of 8 and "
        f"{numbers.share(largest_batch, LABELS)} in a {largest_batch} are recovered. After five local steps an update "
        f"is no gradient; {numbers.nearest('batch of 8, 5 local steps')} are left. No proof stands behind either."
    )


def _noise(numbers: _Numbers, options: dict[str, Any]) -> Iterator[str]:
    """Writes what noise on each message, and noise on their sum, do.

    Args:
      numbers: the comparisons of the study.
      options: the study's options; `epsilons` are rising, and the first one is that of central noise.

    Yields: two paragraphs.
    """
    epsilons = options["epsilons"]
    first = f"{options['epsilons'][0]:g}"  # the smallest epsilon
    local_noise = [
        f"{numbers.nearest(name)} and an advantage of {numbers.of(name, ADVANTAGE):.2f} at epsilon {epsilon:g}"
        for epsilon in reversed(epsilons)
        for name in (f"local noise, epsilon {epsilon:g}",)
    ]
    yield (
        f"Noise on each message takes the pictures first and membership last: {', '.join(local_noise)}. Pictures below "
        f"{numbers.nearest('the mean digit')} show noise. The advantage (true minus false positive rate) of any "
        "attack is at most 2 Phi(C / std) - 1, as a replaced client moves its message by up to 2 C: "
        f"{numbers.bound(f'local noise, epsilon {first}'):.2f} at epsilon {first}. Another digit in place of a "
        "client's own moves it by less than 2 C, so the attack stays below."
    )
    central = f"central noise, epsilon {first}: the server"
    shares = f"shares of noise, epsilon {first} of the sum"
    released = f"central noise, epsilon {first}: the released model"
    yield (
        f"Central noise is drawn after the messages have arrived: at epsilon {first} the server rebuilds pictures of "
        f"{numbers.nearest(central)}. It protects from those who see the released model alone (advantage "
        f"{numbers.of(released, ADVANTAGE):.2f}, at most {numbers.bound(released):.2f}). Shares of that noise on the "
        f"messages are each too small: read one by one they leave an advantage of {numbers.of(shares, ADVANTAGE):.2f}, "
        "so they need a secure sum."
    )


def _compression(numbers: _Numbers, options: dict[str, Any]) -> Iterator[str]:
    """Writes what the coarsest quantiser and the smallest top-k do."""
    bits = min(options["bits"])
    share = min(options["shares"])
    coarse = f"quantisation, {bits} bits"
    sparse = f"top-k, {100 * share:g} %"
    yield (
        f"Compression is no defence. {bits} bits a number leave pictures of {numbers.nearest(coarse)}, {100 * share:g} "
        f"% of the numbers {numbers.nearest(sparse)}; labels are recovered ({numbers.share(coarse, LABELS)} and "
        f"{numbers.share(sparse, LABELS)}) and members found (AUC {numbers.of(coarse, AUC):.2f} and "
        f"{numbers.of(sparse, AUC):.2f}) almost as without it."
    )


def _sums(numbers: _Numbers, options: dict[str, Any]) -> Iterator[str]:
    """Writes what a secure sum does."""
    m = options["num_clients"]
    masked = "secure sum: a masked message"
    summed = f"secure sum: the sum of {m:,}"
    yield (
        f"A masked message of a secure sum holds nothing: labels are guesses ({numbers.share(masked, LABELS)} right), "
        f"members too (AUC {numbers.of(masked, AUC):.2f}). What remains is the sum, one batch of everybody's examples: "
        f"of {m:,} clients the nearest of {HIDDEN} mixtures, nobody's digit, has {numbers.nearest(summed)}, and AUC is "
        f"{numbers.of(summed, AUC):.2f}. A secure sum of few clients hides as little as a batch of so many examples "
        "does, and of one client nothing."
    )
