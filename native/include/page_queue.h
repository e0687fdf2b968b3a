// A block free list that is also balloon, occupancy and victim index. Indices only: it knows nothing of
// Python.
//
// A block is withheld (its page is out of circulation, or it straddles two pages), used, or free. A free
// block is uncached or cached, and lies in one of three lists: uncached, cached (least recently used first),
// or, whatever it is, that of the draining pages. They are handed out in this order: uncached, then the
// blocks of a page that the queue may grow, then cached, and at last, for running requests only, those of
// draining pages. A withheld block is the balloon's, which holds it as a request holds a used one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace kvquota {

class PageQueue {
 public:
  using Range = std::pair<int32_t, int32_t>;

  struct Usage {
    int64_t pinned, evictable, empty, draining;
  };

  // What `check` found. The message says where.
  class Corrupt : public std::logic_error {
   public:
    using std::logic_error::logic_error;
  };

  // `pages[p]` = (first, end) of the blocks of page p; ascending, disjoint. All pages start out of
  // circulation.
  PageQueue(int32_t blocks, const std::vector<Range>& pages);

  // Blocks that may be handed out now, those of growable pages included.
  int64_t num_free() const {
    return uncached_.size + cached_.size + growable_blocks_ + (for_running ? draining_.size : 0);
  }
  // Of those, the ones that hold nothing cached; not counting draining pages.
  int64_t num_uncached() const { return uncached_.size + growable_blocks_; }
  int64_t num_used() const { return used_; }
  // Free blocks that there would be with every page in circulation.
  int64_t max_free() const { return usable_ - used_; }

  // Hands out `count` blocks, one call of `emit(block)` each. The caller has checked `num_free`.
  template <typename Emit>
  void pop(int64_t count, Emit emit) {
    for (; count > 0; --count) {
      if (uncached_.size == 0 && growable_blocks_ > 0) grow();
      List& list = uncached_.size > 0 ? uncached_ : cached_.size > 0 ? cached_ : draining_;
      const int32_t block = nodes_[list.sentinel].next;
      use(block, list);
      emit(block);
    }
  }

  // The rest throws std::invalid_argument, naming the block or page, with nothing changed.
  void remove(int32_t block);
  // `cached`: to the tail of the cached list, in order; else to the head of the uncached one, in order.
  void free(const int32_t* blocks, std::size_t count, bool cached);
  // The free block handed out after `block` (-1: the first); -1 at the end, or where `block` is not free.
  // Passes over what growable pages hold, which is not in circulation, and the blocks of draining pages: from
  // one of those it begins again.
  int32_t after(int32_t block) const;

  // At most `pages` may be grown from now on, until the next call.
  void allow(int64_t pages);
  // Puts a page in circulation that no allowed credit stands for.
  void put(int32_t page);
  // Pages grown since the last call.
  std::vector<int32_t> grown() { return std::exchange(grown_, {}); }
  const std::vector<int32_t>& newly_grown() const { return grown_; }
  // Up to `count` pages without a used block: empty ones first, the highest first, so that what stays is
  // packed low; then those with cached blocks, the one that was freed to the longest ago first.
  std::vector<int32_t> victims(int64_t count) const;
  // Withholds the blocks of a page; returns those that had been freed as cached. It is not grown before
  // `give`.
  std::vector<int32_t> take(int32_t page);
  void give(int32_t page);
  // Makes exactly `count` pinned pages draining, fewer only where there are no more: first those that are,
  // then the emptiest, and after all others those of `keep`. Returns the new ones, whose free blocks are
  // uncached now; the caller drops all that the prefix cache knows of them.
  std::vector<int32_t> drain(int64_t count, const std::vector<int32_t>& keep);
  // Every free block is uncached now: the prefix cache was emptied.
  void uncache_all();
  bool is_draining(int32_t block) const;
  bool is_withheld(int32_t block) const { return nodes_[block].state == State::kWithheld; }
  bool is_free(int32_t block) const { return is_free(nodes_[block]); }
  Range blocks_of(int32_t page) const { return {at(page).first, at(page).end}; }
  // Pages in circulation; `draining` is a part of `pinned`.
  Usage usage() const { return {classes_[kPinned], classes_[kEvictable], classes_[kEmpty], draining_pages_}; }
  int32_t used_blocks(int32_t page) const { return at(page).used; }
  bool in_circulation(int32_t page) const { return at(page).place == Place::kIn; }

  // Walks everything; throws Corrupt where it does not add up.
  void check() const;

  // Whether the next allocations are for requests that run already.
  bool for_running = false;

 private:
  enum class State : uint8_t { kWithheld, kUsed, kUncached, kCached };
  enum class Place : uint8_t { kOut, kIn, kTaken };
  enum Class : uint8_t { kPinned, kEvictable, kEmpty, kClasses };

  struct Node {
    int32_t prev = -1;
    int32_t next = -1;
    int32_t page = -1;  // -1: straddles two pages
    State state = State::kWithheld;
  };
  struct Page {
    int32_t first = 0;
    int32_t end = 0;
    int32_t used = 0;
    int32_t cached = 0;
    int64_t last_use = 0;  // the call of `free` that last freed a block of it
    Place place = Place::kOut;
    bool draining = false;
  };
  struct List {
    int32_t sentinel = 0;
    int64_t size = 0;
  };

  bool is_free(const Node& node) const { return node.state >= State::kUncached; }
  Class class_of(const Page& page) const {
    return page.used > 0 ? kPinned : page.cached > 0 ? kEvictable : kEmpty;
  }
  List& list_of(const Node& node) {
    return pages_[node.page].draining ? draining_ : node.state == State::kCached ? cached_ : uncached_;
  }
  const List& list_of(const Node& node) const { return const_cast<PageQueue*>(this)->list_of(node); }

  void insert(List& list, int32_t block, int32_t before) {
    const int32_t prev = nodes_[before].prev;
    nodes_[block].prev = prev;
    nodes_[block].next = before;
    nodes_[prev].next = block;
    nodes_[before].prev = block;
    ++list.size;
  }
  void push_back(List& list, int32_t block) { insert(list, block, list.sentinel); }
  void unlink(List& list, int32_t block) {
    const Node& node = nodes_[block];
    nodes_[node.prev].next = node.next;
    nodes_[node.next].prev = node.prev;
    --list.size;
  }
  // A free block of `list` becomes used.
  void use(int32_t block, List& list) {
    Node& node = nodes_[block];
    Page& page = pages_[node.page];
    unlink(list, block);
    if (page.used == 0) {
      --classes_[class_of(page)];
      ++classes_[kPinned];
    }
    ++page.used;
    ++used_;
    page.cached -= node.state == State::kCached;
    node.state = State::kUsed;
  }

  Page& at(int32_t page);
  const Page& at(int32_t page) const { return const_cast<PageQueue*>(this)->at(page); }
  void grow();
  void circulate(Page& page);
  void undrain(Page& page);
  void uncache(Page& page);
  void set_growable(int32_t page, bool growable);
  int64_t count_growable() const;

  std::vector<Node> nodes_;  // the blocks, then the sentinels of the three lists
  std::vector<Page> pages_;
  List uncached_, cached_, draining_;
  int64_t classes_[kClasses] = {};
  int64_t draining_pages_ = 0;
  int64_t usable_ = 0;
  int64_t used_ = 0;
  int64_t clock_ = 0;
  int64_t allowed_ = 0;
  int64_t growable_blocks_ = 0;     // in the lowest `allowed_` of the growable pages
  std::vector<uint64_t> growable_;  // a bit for each page that is out of circulation and has a block
  std::size_t growable_from_ = 0;   // no word below has a bit set
  std::vector<int32_t> grown_;
};

}  // namespace kvquota
