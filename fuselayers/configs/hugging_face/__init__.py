"""Models of Hugging Face: the names of their weights, and their config.json. One file per family."""

from .families import FAMILIES as FAMILIES
from .families import config_of as config_of
from .family import Family as Family
from .family import Key as Key
from .load import load_hugging_face as load_hugging_face
from .load import matched as matched
