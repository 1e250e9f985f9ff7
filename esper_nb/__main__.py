"`python -m esper_nb` is the command `esper-nb`, also where no script is on the path."
import sys

from esper_nb.run.cli import main

if __name__ == "__main__": sys.exit(main())
