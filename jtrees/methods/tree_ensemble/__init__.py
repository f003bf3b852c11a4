"""TEL: an ensemble of soft trees that are trained jointly (Hazimeh et al. 2020)."""
