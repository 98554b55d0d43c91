"""The cleaner: settings, a fit, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from threadpoolctl import threadpool_limits

from . import stored, trust
from .decisions import COLUMNS, decided, read_decisions
from .features import views
from .judge import Options, judge
from .read import fingerprint, read
from .rows import Rows
from .verdict import Verdict

FILE = "cleaner.npz"
Suspects = Literal["drop", "relabel", "keep"]


@dataclass(frozen=True)
class Fit:
    """The result of a fit.

    fingerprint: the checksum of the rows. words: a sentence that describes the features.
    path: where the data was read from; None for data in memory. how: the arguments of `read`.
    decisions: the review that was applied to the rows, if any.
    complete: whether the table is the one that was read. A saved one has no images or other objects in its cells.
    """

    rows: Rows
    verdict: Verdict
    fingerprint: str
    words: str
    path: str | None
    how: dict[str, Any]
    decisions: pd.DataFrame | None
    complete: bool = True


@dataclass(eq=False)
class Cleaner:
    """Find wrong labels, with the help of a few labels that were checked if there are any.

    The attributes are the settings, as in scikit-learn; `sklearn.base.clone` copies them.

        cleaner = Cleaner().fit("photos.csv", label="label", checked="checked")
        print(cleaner.trust())         # how far the result can be trusted
        cleaner.issues()               # the suspects, the most suspicious one first
        cleaner.report("report.html")  # a page to review them in
        cleaner.cleaned()              # the table without them
    """

    features: str = "auto"
    """How rows become numbers: auto, pixels, patches, tfidf, columns, FILE.npy, torchvision:NAME or timm:NAME. With
    network, a small network is trained on these rows as well, in minutes. none leaves the features out, if there are
    probabilities."""
    weights: Path | None = None
    """The file with the weights of a torchvision or timm model, where they were not downloaded before."""
    seed: int = 0
    """Seed of every random choice; the same seed gives the same result."""
    options: Options = field(default_factory=Options)
    """How the judging is done."""
    device: str = "cpu"
    """Where models are trained: cpu, cuda, cuda:1, ..."""
    threads: int | None = None
    """Number of processor threads; None leaves that to PyTorch."""
    _fit: Fit | None = field(default=None, init=False, repr=False)

    # --- fitting -----------------------------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        label: str | None = None,
        checked: Any = None,
        *,
        image: str | None = None,
        text: str | None = None,
        columns: Any = None,
        embeddings: Any = None,
        root: Any = None,
        pred_probs: Any = None,
        decisions: str | Path | pd.DataFrame | None = None,
        progress: Any = None,
    ) -> Cleaner:
        """Judge the label of every row of the data, and return the cleaner itself.

        data: a path, a pandas DataFrame, a Hugging Face data set, the NumPy arrays (x, y, checked), or Rows.
        label, checked, image, text, columns, embeddings, root, pred_probs: the parts of the data; see `read`.
        decisions: a review that was exported from the report, as a file or a frame. What it keeps or relabels is known.
        progress: a function that is called with the share of the work that is done, and the name of the current part.
        """
        self._validate()
        how = {"label": label, "checked": checked, "image": image, "text": text, "columns": columns,
               "embeddings": embeddings, "root": root, "pred_probs": pred_probs}  # fmt: skip
        how = {name: value for name, value in how.items() if value is not None}
        if isinstance(data, Rows) and how:
            raise TypeError(f"bilevel-clean: rows that were read already take no {', '.join(how)}; got both.")
        rows = data if isinstance(data, Rows) else read(data, **how)
        review = None if decisions is None else read_decisions(decisions, rows)
        rows = rows if review is None else decided(rows, review)
        with limited(self.threads):
            progress = progress or _silent
            progress(0.0, "features")
            seen, words = views(rows, self.features, seed=self.seed, weights=self.weights, device=self.device,
                                progress=progress)  # fmt: skip
            verdict = judge(seen, rows.y, rows.checked, truth=rows.truth, classes=len(rows.classes), names=rows.classes,
                            seed=self.seed, device=self.device, options=self.options, progress=progress)  # fmt: skip
            progress(1.0, "done")
        path = str(Path(data).absolute()) if isinstance(data, (str, Path)) else None
        self._fit = Fit(rows, verdict, fingerprint(rows), words, path, how, review)
        return self

    def _validate(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"bilevel-clean: threads must be at least 1; got {self.threads}.")
        if self.seed < 0:
            raise ValueError(f"bilevel-clean: seed must not be negative; got {self.seed}.")
        try:
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:  # torch raises either, by device
            why = str(error).splitlines()[0]
            raise ValueError(f"bilevel-clean: device {self.device!r} can't be used here ({why}); use cpu.") from error

    # --- results -----------------------------------------------------------------------------------------------

    @property
    def fitted(self) -> Fit:
        """The result of the last fit or load."""
        if self._fit is None:
            raise AttributeError("bilevel-clean: this cleaner has no result yet; call fit(data) first.")
        return self._fit

    @property
    def rows(self) -> Rows:
        """The data as it was read, with the decisions applied."""
        return self.fitted.rows

    @property
    def verdict(self) -> Verdict:
        """The verdict on each row that was judged."""
        return self.fitted.verdict

    @property
    def frame(self) -> pd.DataFrame:
        """One line for each row of the data, with its index: is_label_issue, label_score (the probability that the
        given label is right; NaN for a skipped row), given_label, suggested_label (of a row that was reviewed, what was
        decided), checked (whether a person has looked at it), skipped (why a row was not judged, or nothing) and name.
        """
        rows, verdict = self.rows, self.verdict
        names, n, unused = np.array(rows.classes, dtype=object), len(rows.table), rows.skipped["row"].to_numpy(int)
        columns: dict[str, Any] = {
            "is_label_issue": _spread(verdict.issue, rows.used, n, False),
            "label_score": _spread(verdict.score, rows.used, n, np.nan),
            "given_label": _spread(names[verdict.given], rows.used, n, ""),
            "suggested_label": _spread(names[verdict.suggested], rows.used, n, ""),
            "checked": _spread(verdict.known, rows.used, n, False),
            "skipped": _spread(rows.skipped["reason"].to_numpy(object), unused, n, ""),
            "name": _spread(np.array([*rows.names, *rows.skipped["name"]], object), [*rows.used, *unused], n, ""),
        }
        return pd.DataFrame(columns, index=rows.table.index)

    def issues(self) -> pd.DataFrame:
        """Return the lines of `frame` whose label is called wrong, the most suspicious first."""
        return self.frame.loc[lambda frame: frame["is_label_issue"]].sort_values(by="label_score", kind="stable")

    def doubts(self) -> pd.DataFrame:
        """Return the lines of `frame` whose label a person has called right, and that is probably wrong all the same,
        the most doubtful first. predicted_label is what the models, which have not seen the row, say."""
        rows, doubted = self.rows, self.verdict.doubted
        names = np.array(rows.classes, dtype=object)
        predicted = names[self.verdict.probabilities[doubted].argmax(1)]
        return self.frame.iloc[rows.used[doubted]].assign(predicted_label=predicted)

    def trust(self) -> str:
        """Return how far the result can be trusted, in a few lines of text: counts, estimates and warnings."""
        return trust.text(self.rows, self.verdict, self.fitted.words)

    def cleaned(self, suspects: Suspects = "drop") -> pd.DataFrame:
        """Return the table that was given, with its index and columns, after cleaning.

        The decisions of a review are applied. The suspects that are left are dropped, relabelled with the suggested
        label, or kept. Rows that were skipped have no label or no readable content, and are left out.
        """
        if suspects not in ("drop", "relabel", "keep"):
            raise ValueError(f"bilevel-clean: suspects is drop, relabel or keep; got {suspects!r}.")
        if not self.fitted.complete:
            self._read_again()
        rows, issue = self.rows, self.verdict.issue
        y = np.where(issue, self.verdict.suggested, rows.labels) if suspects == "relabel" else rows.labels
        stay = np.flatnonzero(~issue) if suspects == "drop" else np.arange(len(issue))
        table = rows.table.iloc[rows.used[stay]].copy()
        if suspects == "relabel" or rows.truth is not None:
            labels = pd.Series([rows.values[c] for c in y[stay]], index=table.index, dtype=object)
            table[rows.label] = labels.astype(table[rows.label].dtype)
        return self._with_new_classes(table)

    def _with_new_classes(self, table: pd.DataFrame) -> pd.DataFrame:
        """Add the rows that a review has given a class of their own, at their places."""
        review, rows = self.fitted.decisions, self.rows
        new = review.loc[review.decision == "new"] if review is not None else pd.DataFrame()
        if not len(new):
            return table
        more = rows.table.iloc[new["row"].to_numpy(int)].copy()
        more[rows.label] = pd.Series(new["label"].to_numpy(object), index=more.index)
        place = pd.Series(np.arange(len(rows.table)), index=rows.table.index)
        whole = pd.concat([table.astype({rows.label: object}), more.astype({rows.label: object})])
        return whole.loc[whole.index.map(place).argsort(kind="stable")] if place.index.is_unique else whole

    def report(
        self, path: str | Path, *, title: str | None = None, command: str = "", table: pd.DataFrame | None = None
    ) -> list[Path]:
        """Write a page to review the suspects in, and return the files that were written.

        command: how the page can be made again. table: a comparison to show on the page.
        """
        from .report import write_report

        if self.rows.content is None:
            self._read_again()
        fitted = self.fitted
        return write_report(
            Path(path), fitted.rows, fitted.verdict, title=title or fitted.rows.title, settings=self.settings(),
            command=command, table=table, decisions=fitted.decisions,
        )  # fmt: skip

    # --- settings and files ------------------------------------------------------------------------------------

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the settings by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}

    def settings(self) -> dict[str, Any]:
        """Return every setting as a plain value, including those of the options."""
        params = self.get_params()
        plain = {name: str(v) if isinstance(v, Path) else v for name, v in params.items() if name != "options"}
        return {**plain, **asdict(self.options)}

    def set_params(self, **params: Any) -> Cleaner:
        """Change settings by name, and return the cleaner itself."""
        unknown = sorted(params.keys() - self.get_params().keys())
        if unknown:
            known = ", ".join(self.get_params())
            raise ValueError(f"bilevel-clean: there is no setting {', '.join(unknown)}; the settings are {known}.")
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def save(self, folder: str | Path) -> Path:
        """Write settings, table and verdict to a file in the folder, and return its path.

        Images and embeddings are not written. A report after loading reads them again.
        """
        fit, path = self.fitted, Path(folder) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        more = {
            "params": self.get_params() | {"options": asdict(self.options)},
            "decisions": None if fit.decisions is None else fit.decisions.to_dict(orient="records"),
            "how": {k: v for k, v in fit.how.items() if isinstance(v, (str, Path, list, tuple))},  # others are data
            "complete": all(stored.is_plain(column) for _, column in fit.rows.table.items()),
            **{k: getattr(fit, k) for k in ("fingerprint", "words", "path")},
        }
        stored.save(path, fit.rows, fit.verdict, more)
        return path

    @classmethod
    def load(cls, folder: str | Path, data: Any = None) -> Cleaner:
        """Read a cleaner that was saved in the folder.

        data: what it was fitted to. Only a report needs it, and only of images or embeddings that were not in a file.
        """
        rows, verdict, more = stored.load(Path(folder) / FILE)
        params, review = more.pop("params"), more.pop("decisions")
        params |= {"options": Options(**params["options"]), "weights": params["weights"] and Path(params["weights"])}
        cleaner = cls(**params)
        decisions = None if review is None else pd.DataFrame(review, columns=COLUMNS)
        cleaner._fit = Fit(rows, verdict, decisions=decisions, **more)
        if data is not None:
            cleaner._attach(data)
        return cleaner

    def _read_again(self) -> None:
        """Read what a saved cleaner does not hold, from its file or from the columns of the table."""
        fit = self.fitted
        why: Exception | None = None
        if fit.path is not None:
            return self._attach(fit.path)
        if fit.complete:
            try:
                return self._attach(fit.rows.table)
            except (ValueError, OSError) as error:
                why = error
        raise ValueError(
            "bilevel-clean: this needs data that a saved cleaner does not hold, such as images or embeddings, and that "
            "did not come from a file. Give the data again, with Cleaner.load(folder, data)."
        ) from why

    def _attach(self, data: Any) -> None:
        """Take the rows of the data, after checking that the cleaner was fitted to them."""
        fit = self.fitted
        rows = data if isinstance(data, Rows) else read(data, **fit.how)
        rows = rows if fit.decisions is None else decided(rows, fit.decisions)
        if fingerprint(rows) != fit.fingerprint:
            raise ValueError("bilevel-clean: the data is not what this cleaner was fitted to; call fit(data) again.")
        self._fit = replace(fit, rows=rows, complete=True)


def _silent(share: float, words: str) -> None:
    """Report no progress."""


def _spread(values: Any, places: Any, n: int, empty: Any) -> Any:
    """Return an array of n entries: the values at their places, and `empty` elsewhere."""
    full = np.full(n, empty, dtype=values.dtype)
    full[places] = values
    return full


@contextmanager
def limited(threads: int | None) -> Iterator[None]:
    """Let torch and the libraries of linear algebra use so many threads in this context; None changes nothing."""
    before = torch.get_num_threads()
    with threadpool_limits(threads):
        torch.set_num_threads(threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)
