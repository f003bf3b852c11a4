"""TEL: an ensemble of soft trees that are trained jointly (Hazimeh et al. 2020)."""

from jtrees.methods.tel.ensemble import Ensemble as Ensemble, hardened as hardened
from jtrees.methods.tel.tel import TEL as TEL, EnsembleModel as EnsembleModel, tel as tel
