"""What this machine's CPU and cards take for the steps of a token: measured once, kept, and read by whoever places.

    samples    weights to measure with
    timing     the ruler
    host       the CPU: what a team reads, a region, a layer
    cards      a card: products, expert groups, whole layers; through the Device interface alone
    store      one file for each CPU and card, by fingerprint
    figures    all of it together, as a ``coli.placement.Probe``

Nothing is decided here.
"""

from coli.probing.figures import forget, machine_figures

__all__ = ["forget", "machine_figures"]
