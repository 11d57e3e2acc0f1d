// Which pages a search shows first: those that say how to do something, then those that say why, then internals.
// A query in Chinese wants Chinese pages; of its other words Sphinx needs only some in a page.
const CHINESE = /[\u3400-\u9fff]/.test(new URLSearchParams(location.search).get("q"));
const FACTORS = [
  [/^zh\//, CHINESE ? 4 : 0.8],
  [/^(start|how-to|coming-from)\//, 1.6],
  [/^tutorials\//, 1.4],
  [/^concepts\/(architecture|hooks|planner-runs|process|verification|why-numbers-differ)$/, 0.5],
  [/^(concepts|reference)\//, 0.8],
];

// Members of classes that a program gets and does not name, such as lockstep.mirroring.optim.optimizer.MirroredOptimizer.
const INNER = /^lockstep(\.\w+){3,}$/;

// All values but `score` are Sphinx's own.
var Scorer = {
  score: ([page, title, , , score]) => {
    const [, factor] = FACTORS.find(([path]) => path.test(page)) || [null, 1];
    return score * factor * (INNER.test(title) ? 0.5 : 1);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
