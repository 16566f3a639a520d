"""The licences of the dependencies, and which of them are allowed."""

import re
from email.message import Message
from importlib.metadata import PackageMetadata, PackageNotFoundError, distribution

from release.work import CheckFailedError

# Licences of code that may be shipped under Apache-2.0, in images too. They only require that their text and notices
# stay with the code, and wheels and images keep both in each package's .dist-info/.
ALLOWED = {
    "Apache-2.0": "our own; NOTICE files stay",
    "MIT": "permissive",
    "MIT-0": "MIT that asks for nothing",
    "BSD-2-Clause": "permissive",
    "BSD-3-Clause": "permissive; their names may not advertise ours",
    "0BSD": "permissive, asks for nothing",
    "ISC": "permissive",
    "MPL-2.0": "copyleft for its own files only; we change none, and wheels and images hold them as source",
    "Zlib": "permissive; changed sources must say so, and we change none",
    "PSF-2.0": "Python's own; permissive",
    "CC0-1.0": "no rights are claimed",
}
# Unambiguous names in older metadata.
SPDX_OF_NAMES = {
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD 2-Clause License": "BSD-2-Clause",
    "BSD 3-Clause License": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
    "Python Software Foundation License": "PSF-2.0",
}
# "BSD License" alone is ambiguous: these are the licence texts in the wheels.
LICENCES_READ = {"lz4": "BSD-3-Clause", "pandas": "BSD-3-Clause", "py4j": "BSD-3-Clause"}


def refused(licence: str) -> list[str]:
    """Return the licences of an SPDX expression that are not allowed; of alternatives joined by OR one suffices.

    Expressions with parentheses are not parsed, and so refused.
    """
    if "(" in licence or not licence:
        return [licence or "no licence"]
    choices = [[name for name in part.split(" AND ") if name not in ALLOWED] for part in licence.split(" OR ")]
    return min(choices, key=len)


def spdx(name: str, metadata: PackageMetadata | Message) -> str:
    """Return the SPDX expression for a package's metadata, or the metadata's own words if they are not known here."""
    keys = ("License-Expression", "License", "Classifier")
    expression, licence, classifiers = (metadata.get_all(key) or [] for key in keys)
    if expression or name in LICENCES_READ:
        return str(expression[0]) if expression else LICENCES_READ[name]
    words = [str(line).strip().splitlines()[0] for line in licence if str(line).strip()]
    words += [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License :: OSI Approved :: ")]
    for word in words:
        if word in ALLOWED or word in SPDX_OF_NAMES:
            return SPDX_OF_NAMES.get(word, word)
    return ", ".join(words)


def licence_of(name: str) -> str:
    """Return the licence of a package that is installed in this environment."""
    try:
        metadata = distribution(name).metadata
    except PackageNotFoundError:
        raise CheckFailedError(
            f"{name} is locked but not installed here, so its licence is not known; run `make install`"
        ) from None
    return spdx(re.sub(r"[-_.]+", "-", name.lower()), metadata)
