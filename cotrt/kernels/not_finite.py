"""Where in a decoder values stop being finite: names of its parts, from the input on."""

from __future__ import annotations

from collections.abc import Sequence


def part_name(number: int, num_layers: int) -> str:
    """0 is the embedding; then the attention and the MLP of each layer; then the head."""
    if number == 0:
        return "the embedding"
    layer, is_mlp = divmod(number - 1, 2)
    if layer == num_layers:
        return "the final norm or the head"
    return f"the {'MLP' if is_mlp else 'attention'} of layer {layer}"


def part_names(firsts: Sequence[int], finite: Sequence[bool], num_layers: int) -> list[str | None]:
    """Names by logits row.

    Args:
        firsts: ``[R]`` number of the first part whose output is not finite, -1 for none.
        finite: ``[R]`` whether the logits are.
        num_layers: of the model.

    Returns:
        None for rows whose logits are finite.
    """
    last = 2 * num_layers + 1
    return [
        None if is_finite else part_name(last if first < 0 else first, num_layers)
        for first, is_finite in zip(firsts, finite, strict=True)
    ]
