"""``coli plan --plot``: a plan as a picture: what lies where, which experts, and where a token's time goes.

Drawn from the plan's own records; nothing is computed here that the plan does not say.  Needs the extra ``plot``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from coli.errors import ColiError, RequestError
from coli.placement.components import COMPONENTS

if TYPE_CHECKING:
    from coli.placement import Plan

_FORMATS = (".png", ".svg", ".pdf")
_GIB = 1 << 30
# Okabe and Ito's palette, which the colour-blind can tell apart; what is no weight is grey.
_COLOURS = {
    "lmhead": "#0072B2", "dnproj": "#009E73", "dnout": "#66C2A4", "attnproj": "#CC79A7", "shexp": "#E69F00",
    "experts": "#56B4E9", "layers": "#999999", "rest": "#BBBBBB", "context": "#D55E00", "hops": "#444444",
    "token": "#777777", "left": "#FFFFFF", "held": "#E6E6E6",
}  # fmt: skip
_NAMES = {
    "lmhead": "lm_head", "dnproj": "DeltaNet in", "dnout": "DeltaNet out", "attnproj": "attention",
    "shexp": "shared experts", "experts": "routed experts", "layers": "fixed cost of layers",
    "rest": "router, norms, embedding", "context": "keys, values, state", "hops": "ways to cards",
    "token": "fixed cost of a token", "left": "left", "held": "held back",
}  # fmt: skip
_CPU = "#C4C4C4"
_DEVICES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
_INK = {"lmhead", "dnproj", "context", "hops", "layers", "token"}  # colours that white text is read on
_LABEL_SHARE = 0.045  # of a bar's length; a shorter piece is named by the legend alone


def check(path: str) -> None:
    """Refuse a file that cannot be drawn, before all else: RequestError, or ColiError without matplotlib."""
    if Path(path).suffix.lower() not in _FORMATS:
        raise RequestError(f"--plot {path!r}: expected a name that ends in one of {', '.join(_FORMATS)}", "plot")
    if not Path(path).absolute().parent.is_dir():
        raise RequestError(f"--plot {path!r}: the folder {Path(path).absolute().parent} does not exist", "plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ColiError("--plot needs matplotlib, which is not installed: pip install 'coli[plot]'") from None


def draw(plan: Plan, model: str, path: str) -> None:
    """Draw a plan into a file, atomically."""
    from matplotlib.figure import Figure  # no window, no backend to choose

    timed = plan.prediction is not None
    n_bars = len(plan.devices) + 1
    others = _alternatives(plan) if timed else []
    heights = [1.1 + 0.5 * n_bars, 3.0] + ([1.3] if timed else []) + ([0.6 + 0.3 * len(others)] if others else [])
    figure = Figure(figsize=(11, sum(heights) + 1.4), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.12, hspace=0.04)
    title = f"{Path(model).name or model}: {plan.place}"
    if timed:
        ms = plan.prediction.ms_per_token
        title += f", predicted {ms:.2f} ms a token ({1e3 / ms:.0f} tok/s)"
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    rows = figure.subplots(len(heights), 1, height_ratios=heights)
    _draw_bytes(rows[0], plan)
    _draw_experts(rows[1], plan)
    if timed:
        _draw_time(rows[2], plan)
    if others:
        _draw_others(rows[3], plan, others)
    partial = Path(path).with_name(f".{Path(path).name}.partial{Path(path).suffix}")
    try:
        figure.savefig(partial, dpi=130)
        partial.replace(path)
    except OSError as error:
        raise ColiError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        partial.unlink(missing_ok=True)


def _draw_bytes(axes: Any, plan: Plan) -> None:
    """A stacked bar for each device and the host, in GiB."""
    shown: set[str] = set()
    labels = []
    for row, device in enumerate((*range(len(plan.devices)), None)):
        sizes = {
            name: sum(d.bytes for d in plan.decisions if d.component == name and d.device == device)
            for name in COMPONENTS
        }
        n_experts = plan.residents[device] if device is not None else plan.shape.expert_count - sum(plan.residents)
        sizes["experts"] = n_experts * plan.shape.expert_bytes
        if device is None:
            sizes["context"] = plan.shape.kv_bytes(plan.context) + plan.shape.state_bytes
            labels.append("host")
        else:
            facts = plan.devices[device]
            sizes["left"] = plan.budgets[device] - sizes["experts"]
            sizes["held"] = facts.free_bytes - facts.allowance_bytes
            labels.append(f"{device}: {facts.name}")
        _stack(axes, row, {name: n_bytes / _GIB for name, n_bytes in sizes.items()}, shown)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_title("What lies where (GiB)", loc="left", fontsize=11)
    _label_pieces(axes, "{:.1f}")
    _finish(axes, shown)


def _draw_experts(axes: Any, plan: Plan) -> None:
    """How often each expert is chosen, hottest first, coloured by where it is: areas are experts used for a token."""
    residents = [
        (expert, device) for device, home in enumerate(plan.homes) for expert in home[: plan.residents[device]]
    ]
    owner = {(expert.layer, expert.index): device for expert, device in residents}
    ranked = plan.ranked
    axes.set_title("Routed experts by heat, and where a token finds them", loc="left", fontsize=11)
    if not ranked:
        axes.text(0.5, 0.5, "the model has none", transform=axes.transAxes, ha="center")
        axes.set_axis_off()
        return
    edges = range(len(ranked) + 1)
    heat = [expert.p for expert in ranked]
    # A device's experts lie among others': what each column is divided into is its share around that rank.
    width = max(1, len(ranked) // 200)
    places = [*range(len(plan.devices)), None]
    shares = {place: [] for place in places}
    for first in range(0, len(ranked), width):
        chunk = ranked[first : first + width]
        mean = sum(heat[first : first + width]) / len(chunk)
        for place in places:
            n = sum(owner.get((expert.layer, expert.index)) == place for expert in chunk)
            shares[place].append(mean * n / len(chunk))
    at = list(edges[: len(ranked) : width])
    labels = []
    for place in places:
        hits = sum(expert.p for expert in ranked if owner.get((expert.layer, expert.index)) == place)
        name = "host" if place is None else f"{place}: {plan.devices[place].name}"
        labels.append(f"{name}, {hits:.1f} a token")
    colours = [_CPU if place is None else _DEVICES[place % len(_DEVICES)] for place in places]
    axes.stackplot(
        [*at, len(ranked)],
        [[*shares[p], shares[p][-1]] for p in places],
        step="post",
        colors=colours,
        labels=labels,
        lw=0,
    )
    axes.set_xlim(0, len(ranked))
    axes.set_ylim(0, 1.08 * max(map(sum, zip(*shares.values(), strict=True))))
    axes.set_xlabel("experts, hottest first", fontsize=9)
    axes.set_ylabel("probability in a token", fontsize=9)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    _legend(axes, 5.0, len(places))
    axes.spines[["top", "right"]].set_visible(False)


def _alternatives(plan: Plan) -> list[tuple[str, float]]:
    """The nearest of those that were looked at, and those that everyone asks about, as (label, ms)."""
    others = [one for one in plan.alternatives[1:] if one.ms_per_token is not None]
    wanted = [one for i, one in enumerate(others) if i < 3 or one.label in ("off", "bytes", "nothing on a device")]
    return [(one.label, one.ms_per_token) for one in wanted]


def _draw_time(axes: Any, plan: Plan) -> None:
    """A token's milliseconds by component."""
    shown: set[str] = set()
    order = (*COMPONENTS, "experts", "context", "rest", "layers", "hops", "token")
    _stack(axes, 0, {name: plan.prediction.us.get(name, 0.0) / 1e3 for name in order}, shown)
    _label_pieces(axes, "{:.2f}")
    axes.set_yticks([0], ["this plan"])
    axes.set_title("A token by component, predicted (ms)", loc="left", fontsize=11)
    _finish(axes, shown)


def _draw_others(axes: Any, plan: Plan, others: list[tuple[str, float]]) -> None:
    """What other placements would take for a token, in all."""
    rows = [("this plan", plan.prediction.ms_per_token), *others]
    for row, (_, ms) in enumerate(rows):
        axes.barh(row, ms, color="#0072B2" if row == 0 else "#C4C4C4", height=0.62)
        axes.text(ms, row, f" {ms:.2f} ms, {1e3 / ms:,.0f} tok/s", va="center", fontsize=8)
    labels = [label if len(label) < 38 else f"{label[:36]}..." for label, _ in rows]
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.invert_yaxis()
    axes.set_title("Beside it, predicted (ms)", loc="left", fontsize=11)
    axes.set_xlim(0, 1.18 * max(ms for _, ms in rows))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _stack(axes: Any, row: int, sizes: dict[str, float], shown: set[str]) -> None:
    left = 0.0
    for name, size in sizes.items():
        if size <= 0:
            continue
        edge = {"edgecolor": "#AAAAAA", "linewidth": 0.6} if name in ("left", "held") else {"linewidth": 0}
        label = None if name in shown else _NAMES[name]
        axes.barh(row, size, left=left, color=_COLOURS[name], height=0.62, label=label, gid=name, **edge)
        shown.add(name)
        left += size


def _label_pieces(axes: Any, form: str) -> None:
    """Numbers on the pieces that have room for one."""
    longest = max((patch.get_x() + patch.get_width() for patch in axes.patches), default=0.0)
    for patch in axes.patches:
        if patch.get_width() > _LABEL_SHARE * longest:
            ink = "white" if patch.get_gid() in _INK else "black"
            centre = patch.get_x() + patch.get_width() / 2
            text = form.format(patch.get_width())
            axes.text(
                centre, patch.get_y() + patch.get_height() / 2, text, ha="center", va="center", color=ink, fontsize=8
            )


def _finish(axes: Any, shown: set[str]) -> None:
    axes.margins(x=0.01)
    axes.set_xlim(left=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _legend(axes, 2.6, 5)


def _legend(axes: Any, below: float, columns: int) -> None:
    """Under the axis.   below : lines of text that the axis takes there."""
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.45, 0), borderaxespad=below, ncols=columns, fontsize=8, frameon=False,
        handlelength=1.0, handleheight=1.0, columnspacing=1.4,
    )  # fmt: skip
