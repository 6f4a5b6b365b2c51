"""What each layer of a model costs, from its rehearsal, in the form that `place` takes."""

from __future__ import annotations

from labkit.parallel.placing.costs import LayerCost
from labkit.parallel.planning.layer_chains import UNDIVIDED, LayerChain
from labkit.parallel.planning.layer_rehearsal import LayerProfile, Pass
from labkit.parallel.planning.levers import PLAIN, Levers
from labkit.parallel.planning.optimizer_rehearsal import MakeOptimizer, adamw, rehearse_optimizer


def layer_costs(
    chain: LayerChain,
    rows: int,
    *,
    levers: Levers = PLAIN,
    make_optimizer: MakeOptimizer = adamw,
) -> list[LayerCost]:
    """One for each layer, in the order of the model; the loss counts with the last.

    Args:
        rows: of a microbatch.

    Raises:
        ValueError: ``rows`` is below 1.
    """
    if rows < 1:
        raise ValueError(f"rows={rows} of a microbatch must be at least 1")
    profiles = [chain.profile(i, rows, levers, UNDIVIDED, False) for i in range(len(chain.names))]
    optimizer = rehearse_optimizer(make_optimizer)
    return [
        LayerCost(
            name=name,
            forward_flops=_flops(profile.forward),
            backward_flops=_flops(profile.first_backward),
            parameter_bytes=profile.parameter_bytes,
            gradient_bytes=profile.gradient_bytes,
            optimizer_bytes=optimizer.state_of(profile.trained_sizes),
            activation_bytes=_kept_bytes(profile, behind),
            output_bytes=profile.message_bytes,
        )
        for name, profile, behind in zip(chain.names, profiles, [*profiles[1:], None], strict=True)
    ]


def _flops(one: Pass) -> int:
    return sum(event.flops for event in one.events)


def _kept_bytes(profile: LayerProfile, behind: LayerProfile | None) -> int:
    """What lies between two layers counts with the one that reads it, if both keep it."""
    kept = profile.kept_bytes + (profile.input_bytes if profile.keeps_input else 0)
    own_output = profile.keeps_output and not (behind is not None and behind.keeps_input)
    return kept + (profile.output_bytes if own_output else 0)
