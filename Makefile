# `make demo` and `make test` do all the set-up on a fresh machine: a .venv here, and nothing outside of it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# PAGE.md COMMAND: make a page of what the command prints, with the notes of PAGE_notes.md at its end.
PAGE := $(BIN)/python -m benchmarks.page

.PHONY: demo test lint types docs widths figures release-check fuzz oldest soak sentinel optimizers loops loop-cost attention tasks plan reversible queries cleaning attribution forecasts paper few-shot few-shot-page bench \
	bench-quick peers gpu-check clean

$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) -e '.[recipes]'
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) -e '.[test]'
	-$(PIP) --no-deps betty-ml
	-$(BIN)/python tools/install_learn2learn.py
	$(BIN)/python tools/mend_torchvision.py
	touch $@

demo: $(VENV)/.demo
	$(BIN)/bilevel-clean demo --overwrite --threads 1

test: lint types
	$(BIN)/pytest -n auto -rs

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/pyright
	$(BIN)/pyright -p recipes
	$(BIN)/pyright -p benchmarks

# The site; the tests build it too.
docs: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open $(CURDIR)/site/index.html"

# Nothing on any page of the site is wider than a phone or a small screen; needs Chromium.
widths: $(VENV)/.test
	ALL_PAGES=1 $(BIN)/pytest tests/test_site.py -k wider

# The pictures of the docs and the table of imports, each in less than a minute.
figures: $(VENV)/.test
	for f in architecture imports memory paper report schedules theorem2 truncation; do $(BIN)/python -m docs.figures.$$f || exit 1; done

# Wheel and sdist, the wheel in an empty environment, README's example against it. See docs/release.md.
release-check: $(VENV)/.test
	$(PIP) -e '.[release]'
	$(BIN)/python tools/release_check.py

# Long: 2,000 random problems for each engine, and the largest error that was found; 400 for the other properties.
fuzz: $(VENV)/.test
	mkdir -p runs && rm -f runs/fuzz.csv
	HYPOTHESIS_PROFILE=fuzz FUZZ_LOG=runs/fuzz.csv $(BIN)/pytest tests/test_properties.py -n auto -k "differences or implicit"
	HYPOTHESIS_PROFILE=wide $(BIN)/pytest tests/test_properties.py -n auto -k "not (differences or implicit)"
	HYPOTHESIS_PROFILE=wide $(BIN)/pytest tests/pullback tests/test_graph.py -n auto -k compile
	$(BIN)/python tests/fuzz_summary.py runs/fuzz.csv

# The core tests on the oldest Python and torch that pyproject.toml allows, in .venv-oldest; downloads several GB.
oldest:
	$(PYTHON) tools/oldest.py

# Long: the sentinel and gradcheck on 460 honest problems and 175 dishonest ones; about two minutes.
sentinel: $(VENV)/.test
	$(PAGE) docs/results/sentinel.md $(BIN)/python tests/sentinel_study.py --gradcheck all

# Every class of torch.optim against the plain loop, beside higher and TorchOpt; half a minute.
optimizers: $(VENV)/.test
	$(PAGE) docs/results/optimizers.md $(BIN)/python tests/optimizers.py

# The gallery: errors, time and memory of every loop, and its pages.
loops: $(VENV)/.test
	$(BIN)/python -m docs.loops

# What the checks and the structure of the core cost.
loop-cost: $(VENV)/.test
	$(PAGE) docs/results/loop.md $(BIN)/python -m benchmarks.loop_cost

# Attention over long sequences: peak memory and time, plain and in chunks; a few minutes, 5 GB.
attention: $(VENV)/.test
	$(BIN)/python -m benchmarks.attention

# MAML with tasks=N beside a loop over the tasks, ours and that of higher: a few minutes.
tasks: $(VENV)/.bench
	$(PAGE) docs/results/tasks.md $(BIN)/python -m benchmarks.tasks

# Which states to keep if the number of steps is not known: steps run again, beside the fewest possible.
plan: $(VENV)/.test
	$(PAGE) docs/results/plan.md $(BIN)/python -m benchmarks.plan

# Training run backwards: bits a weight and step, and the time beside other checkpoints; some minutes.
reversible: $(VENV)/.test
	$(PAGE) docs/results/reversible.md $(BIN)/python -m benchmarks.reversible

# Long: kill -9 at random moments, 400 damaged files of each kind, 1,000 blocks of each engine (docs/results/soak.md).
soak: $(VENV)/.test
	mkdir -p runs && rm -f runs/bad_data.csv
	$(BIN)/python tests/recipes/soak.py 54 > runs/soak_1.md
	HYPOTHESIS_PROFILE=wide BAD_DATA_LOG=$(CURDIR)/runs/bad_data.csv $(BIN)/pytest tests/recipes/test_bad_data.py
	$(BIN)/python tests/recipes/bad_data_summary.py runs/bad_data.csv > runs/soak_2.md
	$(BIN)/python tests/leaking.py docs/results/leaks.png > runs/soak_3.md
	$(PAGE) docs/results/soak.md cat runs/soak_1.md runs/soak_2.md runs/soak_3.md

# Where public data are: make cleaning DATA='dir1 dir2'. What is missing there is not run.
ROOTS = $(foreach d,$(DATA),--data-root $(d))

# Finding wrong labels beside cleanlab, on many kinds of data; reviews by someone who is always right; odd data: about an hour on one
# core. It goes on where it was interrupted.
cleaning: $(VENV)/.test
	$(BIN)/python -m benchmarks.cleaning --seeds 3 --first-seed 100 --threads 1 --out docs/results $(ROOTS)
	$(BIN)/python -m benchmarks.cleaning_review --out docs/results $(ROOTS)
	$(BIN)/python -m benchmarks.cleaning_odd --out docs/results $(ROOTS)

# Which rows made a model do this, ours and dattri: about half an hour on one core. It goes on where it was interrupted.
# dattri goes into a folder of its own, since it brings packages called docs and test. DATA is a folder with MNIST; without it, digits and text.
attribution: $(VENV)/.test
	test -d $(VENV)/attribution-peers || $(PIP) --no-deps --target $(VENV)/attribution-peers dattri==0.3.0
	TQDM_DISABLE=1 $(BIN)/python -m benchmarks.attribution --out docs/results $(if $(DATA),--data-root $(DATA))

# How far hypergradients can be followed, on ten problems: half a minute.
forecasts: $(VENV)/.test
	$(PAGE) docs/results/forecasts.md $(BIN)/python -m benchmarks.forecasts

# The paper's Table 1 and Figures 1 to 3: about 85 minutes on one busy core. It goes on where it was interrupted. DATA is one folder.
PAPER = $(BIN)/python -m bilevel_recipes.data_cleaning --paper --resume --threads 1 $(if $(DATA),--data-root $(DATA))
TWO = --dataset mnist,svhn --solvers gd,bigsam --baselines none
paper: $(VENV)/.test
	$(PAPER) --dataset mnist,fashion-mnist,mnist-qmnist-labels,svhn,cifar10 --seeds 5 --out runs/table1
	$(PAPER) $(TWO) --outer-steps 20 --out runs/figure1
	$(PAPER) --dataset cifar10,fashion-mnist --rho 0.6 --outer-steps 20 --baselines none --seeds 2 --out runs/longer
	$(PAPER) $(TWO) --rho 0.8 --seeds 2 --every 1,5,10,20 --out runs/figure2
	$(PAPER) $(TWO) --rho 0.8 --seeds 2 --steps 25,50,100,200 --out runs/figure3
	$(BIN)/python -m bilevel_recipes.data_cleaning.table1 runs/table1 runs/figure1 runs/longer runs/figure2 runs/figure3 \
		--out docs/results
	$(BIN)/python -m docs.figures.paper

# Few-shot: every study, then the page with the paper's Figures 4 and 5. It takes hours on one core, and goes on where it was interrupted.
# DATA is one folder. A part of it: make few-shot STUDIES='omniglot tiny'; the page has the studies that are finished.
FEWSHOT = $(BIN)/python -m bilevel_recipes.few_shot
TEST = --test-episodes 200 --test-steps 5 --curve-episodes 60 --baselines none
KINDS = --ways 20 --train-queries 5 --also 5x1,5x5,20x5 --seeds 3
SHORT = --dataset omniglot --model conv4 --images 240 --chunk 240 $(KINDS) --outer-steps 100 --curve-points 5 $(TEST)
omniglot = --omniglot --seeds 3
omniglot-float32 = --omniglot --precision float32
LONGER = --omniglot --model conv4 --outer-steps 800 --curve-points 8 $(TEST) --seeds 3
omniglot-solvers = $(LONGER) --solvers gd,bigsam,bigsam-paper-annealed
omniglot-throughout = $(LONGER) --solvers bigsam-convergent,bigsam-paper
figure4-paper = --paper $(SHORT) --steps 1,5,10,20
figure4-rates = $(SHORT) --solvers gd,bigsam --lr 0.8,1.6,4,8,16 --curve-points 1 --test-on val --seeds 1
figure4 = $(SHORT) --solvers gd,bigsam --lr 4 --steps 1,5,10,20
tiny = --dataset tiny-imagenet --train-on train+val --model conv4-pool --ways 20 --train-queries 2 --images 120 --chunk 120 --lr 1.6 --eta 0.003 --mirror \
	--shift 0.05 --zoom 0.15 --light 0.2 --precision auto --test-turns 1 --test-views mirror --outer-steps 1200 --also 5x1,5x5,20x5 --curve-points 12 \
	--curve-episodes 100 --test-episodes 1000 --test-steps 5 --baselines none --solvers gd,bigsam --seeds 3
SHORT5 = --dataset tiny-imagenet --model conv4 --images 120 --chunk 120 $(KINDS) --outer-steps 100 --curve-points 5 $(TEST)
figure5-paper = --paper $(SHORT5)
figure5-rates = $(SHORT5) --solvers gd,bigsam --lr 0.4,0.8,1.6,4 --curve-points 1 --test-on val --seeds 1
figure5 = $(SHORT5) --solvers gd,bigsam --lr 1.6 --steps 1,5,10,20
STUDIES = omniglot omniglot-float32 omniglot-solvers omniglot-throughout figure4-paper figure4-rates figure4 tiny figure5-paper figure5-rates figure5
few-shot: $(VENV)/.test
	$(foreach s,$(STUDIES),$(FEWSHOT) $($(s)) --threads 1 $(if $(DATA),--data-root $(DATA)) --resume --out runs/$(s) &&) true
	$(FEWSHOT).cost --threads 1 $(if $(DATA),--data-root $(DATA)) --out runs/cost
	$(MAKE) few-shot-page

# The page alone, from the studies in RUNS that are finished.
RUNS = runs
few-shot-page: $(VENV)/.test
	$(FEWSHOT).results docs/results/few_shot_notes.md \
		$(patsubst %/results.json,%,$(wildcard $(foreach s,$(STUDIES) cost,$(RUNS)/$(s)/results.json))) --out docs/results

# Side by side with the peers: time, memory, error, time to quality; and the page of goals, which `python -m benchmarks.goals` makes again.
# `bench` takes over an hour, `bench-quick` less than five minutes.
$(VENV)/.bench: $(VENV)/.test
	$(PIP) -e '.[peers]'
	-$(PIP) --no-deps boat-torch
	touch $@

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks --out docs/results $(if $(DATA),--data-root $(DATA))

bench-quick: $(VENV)/.bench
	$(BIN)/python -m benchmarks --quick --out runs/bench-quick

# What each library makes of the loops that people have: about two minutes on one core. HYPERTORCH: a checkout of prolearner/hypertorch.
peers: $(VENV)/.bench
	$(BIN)/python -m benchmarks.peers_matrix --out docs/results
	$(BIN)/python -m docs.front

# On a machine with a GPU: what could not be run without one, and a page to send us.
gpu-check: $(VENV)/.test
	$(BIN)/python -m benchmarks.gpu_check $(if $(DEVICE),--device $(DEVICE))

clean:
	rm -rf $(VENV) .venv-oldest runs site dist .pytest_cache .ruff_cache .hypothesis
