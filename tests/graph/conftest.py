"""The smoke graph is built once, in a folder with an awkward name, and copied for each scenario."""

import pytest
from folders import Folder, make_folder


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> Folder:
    """The smoke graph, built in a folder whose path has a space, an apostrophe, an accent and a symbolic link."""
    real = tmp_path_factory.mktemp("graph") / "Zoé's room n° 1"
    make_folder(real)
    link = real.with_name("a link")
    link.symlink_to(real, target_is_directory=True)
    folder = Folder(link)
    folder.snakemake()
    return folder
