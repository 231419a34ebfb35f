"""Errors of the stand-in for mlflow."""


class MlflowException(Exception):
    pass
