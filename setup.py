"Build metadata, all of it read from `settings.ini`."
import json
from configparser import ConfigParser
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent
parser = ConfigParser(delimiters=["="], inline_comment_prefixes=None)
parser.read(here/"settings.ini", encoding="utf-8")
cfg = parser["DEFAULT"]
lib = cfg["lib_name"]

# Any key NAME_requirements is the extra NAME. Requirements are separated by blanks, so none may hold one.
suffix = "_requirements"
extras = {key.removesuffix(suffix): cfg[key].split() for key in cfg if key.endswith(suffix)}

# nbdev's numbering of the development status, which counts from 0.
statuses = [
    "1 - Planning", "2 - Pre-Alpha", "3 - Alpha", "4 - Beta", "5 - Production/Stable", "6 - Mature", "7 - Inactive"]

class BuildPages(build_py):
    "Build the modules, and put the page that `esper-nb lab` opens beside them, without its outputs."
    def run(self):
        super().run()
        page = json.loads((here/"nbs/tutorials/dashboard.ipynb").read_text(encoding="utf-8"))
        for cell in page["cells"]:
            if cell["cell_type"] == "code": cell["outputs"] = []
        target = Path(self.build_lib, lib, "pages", "dashboard.ipynb")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(page, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


setup(
    cmdclass={"build_py": BuildPages},
    name=lib, version=cfg["version"], description=cfg["description"], keywords=cfg["keywords"].split(),
    author=cfg["author"], author_email=cfg["author_email"], license="Apache-2.0", license_files=["LICENSE"],
    long_description=(here/"README.md").read_text(encoding="utf-8"), long_description_content_type="text/markdown",
    packages=find_packages(include=[lib, f"{lib}.*"]), include_package_data=True,
    package_data={"": ["py.typed", "*.js", "*.css", "*.csv", "*.pyi"]},      # beside the modules that read them
    python_requires=f">={cfg['min_python']}", install_requires=cfg["requirements"].split(), extras_require=extras,
    entry_points={"console_scripts": cfg["console_scripts"].split(), "nbdev": [f"{lib}={lib}._modidx:d"]},
    classifiers=[f"Development Status :: {statuses[cfg.getint('status')]}", "Intended Audience :: Science/Research",
                 "Programming Language :: Python :: 3", "Topic :: Scientific/Engineering :: Artificial Intelligence",
                 "Framework :: Jupyter", "Typing :: Typed"],
    zip_safe=False,
)
