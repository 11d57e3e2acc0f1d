// Which pages a search shows first: those that say how to do something, then those that say why, then internals.
// The values below `score` are Sphinx's own.
const FACTORS = [
  [/^(start|how-to|coming-from)\//, 1.6],
  [/^tutorials\//, 1.4],
  [/^concepts\/(architecture|planner-runs|verification|process|hooks)$/, 0.5],
  [/^reference\/(models|hardware)$/, 0.7],
  [/^zh\//, 0.8], // a query in Chinese finds no others
];

var Scorer = {
  score: ([page, , , , score]) => score * (FACTORS.find(([path]) => path.test(page)) || [null, 1])[1],
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
