/* Search page: ranks the sections of window.SEARCH_INDEX, which docs/site/search.py writes.
   Matches in titles, headings and keywords count more than matches in the text. */
"use strict";

(() => {
  const STOP = new Set(("a an and are as at be by can do does each for from how i if in is it its me my of on one or " +
    "per that the this to use using want we what when which why will with you your").split(" "));
  const EXCERPT = 180;

  const words = text => text.toLowerCase().match(/[\p{L}\p{N}_]+/gu) || [];

  /* A stem is a prefix of the forms of a word: clip, clipped, clipping; sample, samples. */
  function stem(word) {
    if (word.length < 5) return word;
    const short = word.replace(/(ies|ing|ed|es|s|e|y)$/, "");
    return short.length < 4 || word.endsWith("ss") ? word : short;
  }

  const matches = (word, token) => token.length < 4 ? word === token || word === token + "s" : word.startsWith(token);

  const plain = text => ` ${words(text).join(" ")} `;

  /* Stems of the words that matter; of all words if none does. */
  function tokensOf(query) {
    const all = words(query);
    const content = all.filter(word => !STOP.has(word));
    return [...new Set((content.length ? content : all).map(stem))];
  }

  function prepare(index) {
    for (const entry of index) {
      entry.fields = {
        title: words(entry.title), heading: words(entry.heading), keywords: words(entry.keywords), text: words(entry.text),
      };
    }
  }

  function search(index, query) {
    const tokens = tokensOf(query);
    if (!tokens.length) return [];
    const counts = index.map(entry => tokens.map(token => {
      const count = field => entry.fields[field].reduce((sum, word) => sum + matches(word, token), 0);
      return {title: count("title"), heading: count("heading"), keywords: count("keywords"), text: count("text")};
    }));
    /* Rare words say more than common ones. */
    const weight = tokens.map((_, k) => {
      const sections = counts.filter(entry => Object.values(entry[k]).some(Boolean)).length;
      return Math.log(1 + index.length / (1 + sections));
    });
    const phrase = plain(query);
    const results = [];
    index.forEach((entry, i) => {
      let score = 0, hits = 0;
      counts[i].forEach((count, k) => {
        /* A title counts for the top of its page, where the heading is empty, and little for sections below. */
        const title = count.title && (entry.heading ? 2 : 10);
        const found = title + 8 * !!count.heading + 6 * !!count.keywords + Math.min(count.text, 4) / 2;
        if (found) hits += 1;
        score += weight[k] * found;
      });
      if (!hits) return;
      score *= (hits / tokens.length) ** 2;
      if (words(query).length > 1) {
        const named = [entry.heading || entry.title, ...entry.keywords.split(",")];
        if (named.some(name => plain(name).includes(phrase))) score += 40;
        else if (plain(entry.text).includes(phrase)) score += 10;
      } else if (plain(entry.heading || entry.title).endsWith(phrase) && entry.page.startsWith("reference/")) {
        score += 20;  /* "clip" means sw.clip */
      }
      results.push({entry, score, hits});
    });
    results.sort((a, b) => a.entry.last - b.entry.last || b.score - a.score);
    /* The best section of each page; entries of the API reference stand for themselves. */
    const shown = new Set();
    const most = Math.max(...results.map(result => result.hits));
    return results.filter(({entry, hits}) => {
      const key = entry.page.startsWith("reference/") ? entry.page + entry.anchor : entry.page;
      if (shown.has(key) || (most > 1 && hits <= most / 2)) return false;
      return shown.add(key);
    });
  }

  /* Part of the text around the first of the query's words, with these words marked. */
  function excerpt(text, tokens) {
    const parts = text.split(/([\p{L}\p{N}_]+)/u);
    const isHit = part => tokens.some(token => matches(part.toLowerCase(), token));
    let first = parts.findIndex((part, k) => k % 2 && isHit(part));
    if (first < 0) first = 1;
    let start = first, length = 0;
    while (start > 0 && length < EXCERPT / 3) length += parts[--start].length;
    const paragraph = document.createElement("p");
    paragraph.className = "context";
    if (start > 0) paragraph.append("… ");
    let end = start;
    for (length = 0; end < parts.length && length < EXCERPT; end++) {
      length += parts[end].length;
      if (end % 2 && isHit(parts[end])) {
        const mark = document.createElement("mark");
        mark.textContent = parts[end];
        paragraph.append(mark);
      } else paragraph.append(parts[end]);
    }
    if (end < parts.length) paragraph.append(" …");
    return paragraph;
  }

  function show(query) {
    const target = document.getElementById("search-results");
    const results = search(window.SEARCH_INDEX, query);
    const tokens = tokensOf(query);
    const summary = document.createElement("p");
    summary.className = "search-summary";
    summary.textContent = results.length
      ? `${results.length} page${results.length > 1 ? "s" : ""} found for “${query}”`
      : `Nothing found for “${query}”. Try another word, or the table of questions.`;
    const list = document.createElement("ul");
    list.className = "search";
    for (const {entry} of results) {
      const link = document.createElement("a");
      link.href = entry.page + (entry.anchor && `#${entry.anchor}`);
      link.textContent = entry.heading ? `${entry.title} › ${entry.heading}` : entry.title;
      const item = document.createElement("li");
      item.append(link, excerpt(entry.text || window.SEARCH_INDEX[window.SEARCH_INDEX.indexOf(entry) + 1].text, tokens));
      list.append(item);
    }
    target.replaceChildren(summary, list);
  }

  const query = new URLSearchParams(location.search).get("q") || "";
  prepare(window.SEARCH_INDEX);
  document.querySelectorAll(".sidebar-search").forEach(box => { box.value = query; });
  if (query.trim()) show(query);
})();
