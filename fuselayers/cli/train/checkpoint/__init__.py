"""Checkpoints of a run: sharded, checked, and whole or not there."""

from .folders import FOLDER_NAME as FOLDER_NAME
from .folders import checkpoints_of as checkpoints_of
from .folders import find_checkpoint as find_checkpoint
from .folders import newest as newest
from .folders import run_of as run_of
from .index import Checkpoint as Checkpoint
from .index import Texts as Texts
from .read import read_checkpoint as read_checkpoint
from .read import whole_tensors as whole_tensors
from .save import Saver as Saver
from .save import save as save
from .state import MODEL as MODEL
from .state import load_state as load_state
from .state import not_finite as not_finite
from .state import state_of as state_of
