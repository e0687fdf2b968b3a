#include "page_mapper.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace kvquota {
namespace {

// Unmapping holds the process's address space, or the driver, for as long as it takes, and the engine thread
// may want to map. An A100 takes 10 us for each granule and 16 for the call: longer calls save little.
constexpr uint64_t kUnmapBytes = 32 << 20;

}  // namespace

bool PageMemory::is_mapped() const { return std::find(mapped.begin(), mapped.end(), true) != mapped.end(); }

PageMapper::PageMapper(std::shared_ptr<Driver> driver, std::vector<uint64_t> strides, uint64_t pages)
    : driver_(std::move(driver)), strides_(std::move(strides)), pages_(pages) {
  if (strides_.empty()) throw std::invalid_argument("strides is empty: an arena backs at least one tensor");
  if (pages_ == 0) throw std::invalid_argument("pages is 0: an arena has at least one page");
  const size_t granularity = driver_->granularity();
  for (const uint64_t stride : strides_) {
    if (stride == 0 || stride % granularity != 0) {
      throw std::invalid_argument("stride " + std::to_string(stride) +
                                  " is not a multiple of the granularity, " + std::to_string(granularity) +
                                  " bytes");
    }
    if (stride > (UINT64_MAX / 2 - size_) / pages_) {
      throw std::invalid_argument("stride " + std::to_string(stride) + " times " + std::to_string(pages_) +
                                  " pages is more than there are addresses");
    }
    offsets_.push_back(size_);
    size_ += stride * pages_;
    page_bytes_ += stride;
  }
  insist([&] { base_ = driver_->address_reserve(size_); });
  reserved_ = true;
}

void PageMapper::free_addresses() {
  if (!reserved_) return;
  insist([&] { driver_->address_free(base_, size_); });
  reserved_ = false;
}

uintptr_t PageMapper::address(size_t tensor, uint64_t page) const {
  return base_ + offsets_[tensor] + page * strides_[tensor];
}

std::vector<PageMapper::Run> PageMapper::runs(const std::vector<uint64_t>& pages, uint64_t most) {
  std::vector<Run> found;
  for (const uint64_t page : pages) {
    if (!found.empty() && page == found.back().first + found.back().count && found.back().count < most) {
      ++found.back().count;
    } else {
      found.push_back({page, 1});
    }
  }
  return found;
}

void PageMapper::create(PageMemory& memory) {
  memory.mapped.assign(strides_.size(), false);
  for (const uint64_t stride : strides_) {
    insist([&] { memory.handles.push_back(driver_->mem_create(stride)); });
  }
}

void PageMapper::release(PageMemory& memory) {
  while (!memory.handles.empty()) {
    insist([&] { driver_->mem_release(memory.handles.back()); });
    memory.handles.pop_back();
  }
}

void PageMapper::map_run(size_t tensor, const Run& run, PageSet& pages) {
  uint64_t page = run.first;
  try {
    for (; page < run.first + run.count; ++page) {
      PageMemory& memory = pages.at(page);
      insist([&] { driver_->mem_map(address(tensor, page), strides_[tensor], memory.handles[tensor]); });
      memory.mapped[tensor] = true;
    }
    page = run.first;
    insist([&] { driver_->mem_set_access(address(tensor, run.first), run.count * strides_[tensor]); });
  } catch (const DriverError& error) {
    throw error.at(page);
  }
}

void PageMapper::map(PageSet& pages, std::vector<PageError>& stuck) {
  std::vector<uint64_t> indices;
  for (const auto& [page, memory] : pages) indices.push_back(page);
  const std::vector<Run> all = runs(indices, pages_);
  try {
    for (size_t tensor = 0; tensor < strides_.size(); ++tensor) {
      for (const Run& run : all) map_run(tensor, run, pages);
    }
  } catch (const DriverError&) {
    stuck = unmap(pages);
    throw;
  }
}

uint64_t PageMapper::pages_at_once() const {
  return std::max<uint64_t>(1, kUnmapBytes / *std::min_element(strides_.begin(), strides_.end()));
}

std::vector<PageError> PageMapper::unmap(PageSet& pages) {
  std::vector<PageError> failed;
  for (size_t tensor = 0; tensor < strides_.size(); ++tensor) {
    const uint64_t stride = strides_[tensor];
    std::vector<uint64_t> mapped;
    for (const auto& [page, memory] : pages) {
      if (memory.mapped[tensor]) mapped.push_back(page);
    }
    for (const Run& run : runs(mapped, std::max<uint64_t>(1, kUnmapBytes / stride))) {
      bool whole = false;
      if (run.count > 1) {
        try {
          driver_->mem_unmap(address(tensor, run.first), run.count * stride);
          whole = true;
        } catch (const DriverError&) {
          // Page by page, below, which tells the page that fails from its neighbours.
        }
      }
      for (uint64_t page = run.first; page < run.first + run.count; ++page) {
        try {
          if (!whole) insist([&] { driver_->mem_unmap(address(tensor, page), stride); });
          pages.at(page).mapped[tensor] = false;
        } catch (const DriverError& error) {
          failed.push_back({page, error.at(page)});
        }
      }
    }
  }
  return failed;
}

}  // namespace kvquota
