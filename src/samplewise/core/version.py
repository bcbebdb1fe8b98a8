"""Version of the installed package, which pyproject.toml states."""

from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "unknown"


def installed_version(package: str = "samplewise") -> str:
    """Return the version of an installed package; "unknown" for one that is imported without being installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return UNKNOWN
