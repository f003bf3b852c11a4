"""Non-greedy oblique trees (Norouzi et al. 2015), and the greedy trees that initialise them."""

from jtrees.methods.nongreedy.co2 import CO2 as CO2
from jtrees.methods.nongreedy.nongreedy import NonGreedy as NonGreedy, nongreedy as nongreedy
