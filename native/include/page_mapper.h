// Pages as driver calls: a reserved range for all tensors, and what backs a page of it. Knows no thread and
// no count.
//
// Every call is tried three times unless memory ran out. What a failed call leaves behind stays in the
// PageMemory, so the same step can be tried again.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "driver.h"

namespace kvquota {

// The physical memory of one page. Index: the tensor.
struct PageMemory {
  std::vector<Driver::Handle> handles;
  std::vector<bool> mapped;

  bool is_mapped() const;
};

using PageSet = std::map<uint64_t, PageMemory>;

struct PageError {
  uint64_t page;
  DriverError error;
};

class PageMapper {
 public:
  // Reserves the addresses: no work for each page. Throws std::invalid_argument on an impossible geometry.
  PageMapper(std::shared_ptr<Driver> driver, std::vector<uint64_t> strides, uint64_t pages);

  Driver& driver() const { return *driver_; }
  const std::vector<uint64_t>& strides() const { return strides_; }
  const std::vector<uint64_t>& offsets() const { return offsets_; }
  uint64_t pages() const { return pages_; }
  uint64_t page_bytes() const { return page_bytes_; }
  uintptr_t base() const { return base_; }
  uint64_t size() const { return size_; }

  // Takes memory for a page. On an exception `memory` has what is still to be released.
  void create(PageMemory& memory);
  // On an exception `memory` has what is still to be released.
  void release(PageMemory& memory);
  // On an exception (which names the page) nothing is mapped, but for pages that could not be unmapped again:
  // `stuck`.
  void map(PageSet& pages, std::vector<PageError>& stuck);
  // Pages to unmap at once: what waits behind them waits for no more.
  uint64_t pages_at_once() const;
  // Unmaps all it can, neighbouring pages in one call, and returns the pages that still are mapped, and why.
  std::vector<PageError> unmap(PageSet& pages);
  // Gives the addresses back, once.
  void free_addresses();

  // Calls up to three times.
  template <typename Call>
  static void insist(Call call) {
    for (int attempt = 1;; ++attempt) {
      try {
        call();
        return;
      } catch (const DriverError& error) {
        if (error.out_of_memory() || attempt == 3) throw;
      }
    }
  }

 private:
  // `count` neighbouring pages from `first`.
  struct Run {
    uint64_t first;
    uint64_t count;
  };

  uintptr_t address(size_t tensor, uint64_t page) const;
  // Of at most `most` pages each.
  static std::vector<Run> runs(const std::vector<uint64_t>& pages, uint64_t most);
  void map_run(size_t tensor, const Run& run, PageSet& pages);

  const std::shared_ptr<Driver> driver_;
  const std::vector<uint64_t> strides_;
  const uint64_t pages_;
  std::vector<uint64_t> offsets_;
  uint64_t page_bytes_ = 0;
  uint64_t size_ = 0;
  uintptr_t base_ = 0;
  bool reserved_ = false;
};

}  // namespace kvquota
