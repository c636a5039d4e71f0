"""The paper's studies by name: `python -m studies`.

NAME.yaml      what is compared, at two scales
definition.py  YAML -> runs, each with a label and a configuration
runner.py      trains what is left of them
judging.py     accuracy, loss and spectral radius of a run, by number of turns
curves.py      medians over seeds, and how far two curves are apart
findings.py    the paper's findings, held against them; verdicts.py what that comes to
outcome.py     study.json and the table; figure.py the picture
"""
