from asyncrl.python_api.run import Run as Run
from asyncrl.python_api.run import launch as launch
from asyncrl.python_api.run import train as train
from asyncrl.python_api.settings import Config as Config

__version__: str
__all__ = ["Config", "Run", "__version__", "launch", "train"]
