#include "page_queue.h"

#include <algorithm>
#include <string>

namespace kvquota {
namespace {

std::string number(int64_t value) { return std::to_string(value); }

}  // namespace

PageQueue::PageQueue(int32_t blocks, const std::vector<Range>& pages)
    : nodes_(static_cast<std::size_t>(blocks) + 3),
      pages_(pages.size()),
      growable_((pages.size() + 63) / 64) {
  List* lists[] = {&uncached_, &cached_, &draining_};
  for (int32_t i = 0; i < 3; ++i) {
    const int32_t sentinel = blocks + i;
    lists[i]->sentinel = nodes_[sentinel].prev = nodes_[sentinel].next = sentinel;
  }
  int32_t end = 0;
  for (std::size_t p = 0; p < pages.size(); ++p) {
    const Range range = pages[p];
    if (range.first < end || range.second < range.first || range.second > blocks) {
      throw std::invalid_argument("page " + number(p) + " has blocks " + number(range.first) + " to " +
                                  number(range.second) + ": expected an ascending range between " +
                                  number(end) + " and " + number(blocks));
    }
    end = range.second;
    pages_[p].first = range.first;
    pages_[p].end = range.second;
    usable_ += range.second - range.first;
    for (int32_t block = range.first; block < end; ++block) nodes_[block].page = static_cast<int32_t>(p);
    set_growable(static_cast<int32_t>(p), true);
  }
}

void PageQueue::remove(int32_t block) {
  const Node& node = nodes_[block];
  if (!is_free(node)) {
    const char* state = node.state == State::kUsed ? "used" : "withheld";
    throw std::invalid_argument("block " + number(block) + " is " + state +
                                ": only a free block can be removed");
  }
  use(block, list_of(node));
}

void PageQueue::free(const int32_t* blocks, std::size_t count, bool cached) {
  const State state = cached ? State::kCached : State::kUncached;
  // The states first: so a block that is named twice is found before anything has moved.
  for (std::size_t i = 0; i < count; ++i) {
    Node& node = nodes_[blocks[i]];
    if (node.state != State::kUsed) {
      const bool withheld = node.state == State::kWithheld;
      const char* why =
          withheld ? " is withheld: it is not in use, so it cannot be freed" : " is free already";
      while (i-- > 0) nodes_[blocks[i]].state = State::kUsed;
      throw std::invalid_argument("block " + number(&node - nodes_.data()) + why);
    }
    node.state = state;
  }
  ++clock_;
  int32_t last = uncached_.sentinel;  // the one that was prepended last
  for (std::size_t i = 0; i < count; ++i) {
    const int32_t block = blocks[i];
    Page& page = pages_[nodes_[block].page];
    page.last_use = clock_;
    page.cached += cached;
    if (page.draining) {
      push_back(draining_, block);
    } else if (cached) {
      push_back(cached_, block);
    } else {
      insert(uncached_, block, nodes_[last].next);
      last = block;
    }
    if (--page.used == 0) {
      --classes_[kPinned];
      ++classes_[class_of(page)];
      if (page.draining) undrain(page);
    }
  }
  used_ -= static_cast<int64_t>(count);
}

int32_t PageQueue::after(int32_t block) const {
  const List* list = &uncached_;
  int32_t next = nodes_[uncached_.sentinel].next;
  if (block >= 0) {
    const Node& node = nodes_[block];
    if (!is_free(node)) return -1;
    if (&list_of(node) != &draining_) {
      list = &list_of(node);
      next = node.next;
    }
  }
  if (next == uncached_.sentinel) {
    list = &cached_;
    next = nodes_[cached_.sentinel].next;
  }
  return next == list->sentinel ? -1 : next;
}

void PageQueue::allow(int64_t pages) {
  if (pages < 0) throw std::invalid_argument(number(pages) + " pages allowed: expected 0 or more");
  if (pages == allowed_) return;
  allowed_ = pages;
  growable_blocks_ = count_growable();
}

void PageQueue::put(int32_t page) {
  Page& target = at(page);
  if (target.place != Place::kOut) {
    throw std::invalid_argument(
        "page " + number(page) +
        (target.place == Place::kIn ? " is in circulation already" : " is not given back yet"));
  }
  circulate(target);
  growable_blocks_ = count_growable();
}

std::vector<int32_t> PageQueue::victims(int64_t count) const {
  if (count < 0) throw std::invalid_argument(number(count) + " victims: expected 0 or more");
  std::vector<int32_t> found;
  if (count == 0) return found;
  for (std::size_t p = 0; p < pages_.size(); ++p) {
    if (pages_[p].place == Place::kIn && pages_[p].used == 0) found.push_back(static_cast<int32_t>(p));
  }
  const auto first = [this](int32_t a, int32_t b) {
    const Page& left = pages_[a];
    const Page& right = pages_[b];
    if ((left.cached == 0) != (right.cached == 0)) return left.cached == 0;
    if (left.cached > 0 && left.last_use != right.last_use) return left.last_use < right.last_use;
    return a > b;
  };
  const auto kept = found.begin() + std::min<int64_t>(count, static_cast<int64_t>(found.size()));
  std::partial_sort(found.begin(), kept, found.end(), first);
  found.erase(kept, found.end());
  return found;
}

std::vector<int32_t> PageQueue::take(int32_t page) {
  Page& target = at(page);
  if (target.place != Place::kIn) {
    throw std::invalid_argument("page " + number(page) + " is not in circulation: it cannot be taken");
  }
  if (target.used > 0) {
    int32_t block = target.first;
    while (nodes_[block].state != State::kUsed) ++block;
    throw std::invalid_argument("page " + number(page) + " cannot be taken: its block " + number(block) +
                                " is used");
  }
  std::vector<int32_t> cached;
  cached.reserve(static_cast<std::size_t>(target.cached));
  --classes_[class_of(target)];
  for (int32_t block = target.first; block < target.end; ++block) {
    Node& node = nodes_[block];
    unlink(list_of(node), block);
    if (node.state == State::kCached) cached.push_back(block);
    node.state = State::kWithheld;
  }
  target.cached = 0;
  target.place = Place::kTaken;
  return cached;
}

void PageQueue::give(int32_t page) {
  Page& target = at(page);
  if (target.place != Place::kTaken) throw std::invalid_argument("page " + number(page) + " is not taken");
  target.place = Place::kOut;
  set_growable(page, true);
  growable_blocks_ = count_growable();
}

std::vector<int32_t> PageQueue::drain(int64_t count, const std::vector<int32_t>& keep) {
  if (count < 0) throw std::invalid_argument(number(count) + " pages to drain: expected 0 or more");
  bool kept_drains = false;
  for (const int32_t page : keep) kept_drains |= at(page).draining;
  std::vector<int32_t> added;
  if (count == draining_pages_ && !kept_drains) return added;

  std::vector<int32_t> pinned;
  for (std::size_t p = 0; p < pages_.size(); ++p) {
    if (pages_[p].used > 0) pinned.push_back(static_cast<int32_t>(p));
  }
  std::vector<bool> kept(pages_.size());
  for (const int32_t page : keep) kept[page] = true;
  const auto first = [this, &kept](int32_t a, int32_t b) {
    const Page& left = pages_[a];
    const Page& right = pages_[b];
    if (kept[a] != kept[b]) return !kept[a];
    if (left.draining != right.draining) return left.draining;
    return left.used != right.used ? left.used < right.used : a > b;
  };
  const auto chosen = pinned.begin() + std::min<int64_t>(count, static_cast<int64_t>(pinned.size()));
  std::partial_sort(pinned.begin(), chosen, pinned.end(), first);
  std::vector<bool> stays(pages_.size());
  for (auto page = pinned.begin(); page != chosen; ++page) stays[*page] = true;
  for (std::size_t p = 0; p < pages_.size(); ++p) {
    if (pages_[p].draining && !stays[p]) undrain(pages_[p]);
  }
  for (auto index = pinned.begin(); index != chosen; ++index) {
    Page& page = pages_[*index];
    if (page.draining) continue;
    uncache(page);
    for (int32_t block = page.first; block < page.end; ++block) {
      if (!is_free(nodes_[block])) continue;
      unlink(list_of(nodes_[block]), block);
      push_back(draining_, block);
    }
    page.draining = true;
    ++draining_pages_;
    added.push_back(*index);
  }
  return added;
}

void PageQueue::uncache_all() {
  for (Page& page : pages_) uncache(page);
}

bool PageQueue::is_draining(int32_t block) const {
  const int32_t page = nodes_[block].page;
  return page >= 0 && pages_[page].draining;
}

PageQueue::Page& PageQueue::at(int32_t page) {
  if (page < 0 || static_cast<std::size_t>(page) >= pages_.size()) {
    throw std::invalid_argument("no page " + number(page) + ": there are " + number(pages_.size()));
  }
  return pages_[page];
}

void PageQueue::grow() {
  while (growable_[growable_from_] == 0) ++growable_from_;
  const auto page = static_cast<int32_t>(growable_from_ * 64 + __builtin_ctzll(growable_[growable_from_]));
  grown_.push_back(page);
  --allowed_;
  growable_blocks_ -= pages_[page].end - pages_[page].first;
  circulate(pages_[page]);
}

void PageQueue::circulate(Page& page) {
  set_growable(static_cast<int32_t>(&page - pages_.data()), false);
  page.place = Place::kIn;
  page.last_use = clock_;
  ++classes_[kEmpty];
  for (int32_t block = page.first; block < page.end; ++block) {
    nodes_[block].state = State::kUncached;
    push_back(uncached_, block);
  }
}

void PageQueue::undrain(Page& page) {
  for (int32_t block = page.first; block < page.end; ++block) {
    if (is_free(nodes_[block])) unlink(draining_, block);
  }
  page.draining = false;
  --draining_pages_;
  for (int32_t block = page.first; block < page.end; ++block) {
    if (is_free(nodes_[block])) push_back(list_of(nodes_[block]), block);
  }
}

void PageQueue::uncache(Page& page) {
  if (page.cached == 0) return;
  --classes_[class_of(page)];
  for (int32_t block = page.first; block < page.end; ++block) {
    Node& node = nodes_[block];
    if (node.state != State::kCached) continue;
    unlink(list_of(node), block);
    node.state = State::kUncached;
    push_back(list_of(node), block);
  }
  page.cached = 0;
  ++classes_[class_of(page)];
}

void PageQueue::set_growable(int32_t page, bool growable) {
  const std::size_t word = static_cast<std::size_t>(page) / 64;
  const uint64_t bit = uint64_t{1} << (page % 64);
  if (growable && pages_[page].first < pages_[page].end) {
    growable_[word] |= bit;
    growable_from_ = std::min(growable_from_, word);
  } else {
    growable_[word] &= ~bit;
  }
}

int64_t PageQueue::count_growable() const {
  int64_t blocks = 0;
  int64_t left = allowed_;
  for (std::size_t word = growable_from_; word < growable_.size() && left > 0; ++word) {
    for (uint64_t bits = growable_[word]; bits != 0 && left > 0; bits &= bits - 1, --left) {
      const Page& page = pages_[word * 64 + __builtin_ctzll(bits)];
      blocks += page.end - page.first;
    }
  }
  return blocks;
}

void PageQueue::check() const {
  const auto expect = [](int64_t booked, int64_t counted, const std::string& what) {
    if (booked == counted) return;
    throw Corrupt(what + ": " + number(booked) + " in the books, " + number(counted) + " counted");
  };
  int64_t listed = 0;
  for (const List* list : {&uncached_, &cached_, &draining_}) {
    int64_t size = 0;
    int32_t prev = list->sentinel;
    for (int32_t block = nodes_[prev].next; block != list->sentinel; block = nodes_[block].next) {
      const std::string name = "block " + number(block);
      expect(nodes_[block].prev, prev, name + ", the one before it");
      if (!is_free(nodes_[block])) throw Corrupt(name + " is in a free list, but not free");
      if (&list_of(nodes_[block]) != list) throw Corrupt(name + " is in the wrong free list");
      if (++size > usable_) throw Corrupt("a free list without an end");
      prev = block;
    }
    expect(list->size, size, "free list " + number(list->sentinel));
    listed += size;
  }
  int64_t classes[kClasses] = {};
  int64_t draining = 0, used = 0, usable = 0, free = 0;
  for (std::size_t p = 0; p < pages_.size(); ++p) {
    const Page& page = pages_[p];
    const std::string name = "page " + number(p);
    int32_t page_used = 0, page_cached = 0, page_free = 0, page_withheld = 0;
    for (int32_t block = page.first; block < page.end; ++block) {
      expect(nodes_[block].page, static_cast<int64_t>(p), "block " + number(block) + ", its page");
      page_used += nodes_[block].state == State::kUsed;
      page_cached += nodes_[block].state == State::kCached;
      page_free += is_free(nodes_[block]);
      page_withheld += nodes_[block].state == State::kWithheld;
    }
    expect(page.used, page_used, name + ", used blocks");
    expect(page.cached, page_cached, name + ", cached blocks");
    expect(page_withheld, page.place == Place::kIn ? 0 : page.end - page.first, name + ", withheld blocks");
    const bool growable = page.place == Place::kOut && page.first < page.end;
    expect((growable_[p / 64] >> (p % 64)) & 1, growable, name + ", growable");
    if (page.draining && page.used == 0) throw Corrupt(name + " drains, but no block of it is used");
    if (page.place == Place::kIn) ++classes[class_of(page)];
    draining += page.draining;
    used += page_used;
    free += page_free;
    usable += page.end - page.first;
  }
  expect(listed, free, "free blocks");
  expect(used_, used, "used blocks");
  expect(usable_, usable, "usable blocks");
  expect(draining_pages_, draining, "draining pages");
  expect(classes_[kPinned], classes[kPinned], "pinned pages");
  expect(classes_[kEvictable], classes[kEvictable], "evictable pages");
  expect(classes_[kEmpty], classes[kEmpty], "empty pages");
  for (std::size_t word = 0; word < growable_from_; ++word)
    expect(growable_[word] != 0, 0, "growable pages below");
  expect(growable_blocks_, count_growable(), "growable blocks");
  for (std::size_t i = 0; i + 3 < nodes_.size(); ++i) {
    if (nodes_[i].page < 0 && nodes_[i].state != State::kWithheld) {
      throw Corrupt("block " + number(static_cast<int64_t>(i)) + " straddles two pages, but is not withheld");
    }
  }
}

}  // namespace kvquota
