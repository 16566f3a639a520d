"""Under what licences the dependencies are, and whether all of them are fine."""

import re
from email.message import Message
from importlib.metadata import PackageMetadata, PackageNotFoundError, distribution

from release.work import Failed

# What we may ship under Apache-2.0, in images too. All of these ask no more than that their text and notices stay
# beside the code, and wheels and images keep them in each package's .dist-info/.
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
# What older metadata say in words, where the words leave no doubt.
SPOKEN = {
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD 2-Clause License": "BSD-2-Clause",
    "BSD 3-Clause License": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
    "Python Software Foundation License": "PSF-2.0",
}
# "BSD License" alone may be one of several: this is what the text in their wheels is.
READ = {"lz4": "BSD-3-Clause", "pandas": "BSD-3-Clause", "py4j": "BSD-3-Clause"}


def refused(licence: str) -> list[str]:
    """Return what of an SPDX expression is not allowed; of things joined by OR one will do."""
    if "(" in licence or not licence:
        return [licence or "no licence"]
    choices = [[it for it in part.split(" AND ") if it not in ALLOWED] for part in licence.split(" OR ")]
    return min(choices, key=len)


def spdx(name: str, about: PackageMetadata | Message) -> str:
    """Return the SPDX expression for what a package says of itself; where that is none we know, what it says."""
    keys = ("License-Expression", "License", "Classifier")
    expression, licence, classifiers = (about.get_all(key) or [] for key in keys)
    if expression or name in READ:
        return str(expression[0]) if expression else READ[name]
    words = [str(it).strip().splitlines()[0] for it in licence if str(it).strip()]
    words += [it.rpartition(" :: ")[2] for it in classifiers if it.startswith("License :: OSI Approved :: ")]
    for word in words:
        if word in ALLOWED or word in SPOKEN:
            return SPOKEN.get(word, word)
    return ", ".join(words)


def licence_of(name: str) -> str:
    """Return the licence of a package that is installed here."""
    try:
        found = distribution(name).metadata
    except PackageNotFoundError:
        raise Failed(
            f"{name} is locked but not installed here, so its licence is not known; run `make install`"
        ) from None
    return spdx(re.sub(r"[-_.]+", "-", name.lower()), found)
