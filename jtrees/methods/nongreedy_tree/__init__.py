"""Non-greedy oblique trees (Norouzi et al. 2015), and the greedy trees that initialise them."""
